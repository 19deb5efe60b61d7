import pytest
import torch

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def test_what_rounding_loses_is_counted(import_benchmark):
    script = import_benchmark("float8_gradients")
    values = torch.tensor([448.0, 0.0, 1.0625, 2.0**-11])
    found = script.losses_of(values)
    assert found["e4m3 zeros"] == pytest.approx(1 / 3)
    assert found["e5m2 zeros"] == 0.0
    assert found["peak"] == pytest.approx(2.0, rel=1e-4)
    assert found["e4m3 error"] == pytest.approx(0.0625 / 448, rel=0.01), (
        "1.0625 lies between two, 2 ** -11 is next to 0"
    )


def test_a_training_is_looked_at(import_benchmark):
    found = import_benchmark("float8_gradients").CASES["few"]()
    layers = 4 * 5
    assert found["looked at"] == layers, "at one step of three"
    assert 0.02 < found["e4m3 error"] < 0.03 < 0.045 < found["e5m2 error"] < 0.06
    assert found["most peak"]["is"] >= found["peak"] > 1
    assert found["most peak"]["of"].startswith("model.layers.")


def test_a_model_that_needs_a_gpu_says_so(import_benchmark, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    script = import_benchmark("float8_gradients")
    assert script.unmet(["quickstart"]) is None
    assert "needs 1 GPU" in script.unmet(["1B"])
