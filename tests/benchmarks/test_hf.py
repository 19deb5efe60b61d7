import os
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
from accelerate.state import AcceleratorState

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def hf(import_benchmark, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    module = import_benchmark("hf")
    monkeypatch.setattr(module, "compiled", dict)
    monkeypatch.setattr(module, "preset", lambda: {"precision": "bf16-mixed", "callbacks": []})
    with patch.dict(os.environ):
        module.load()
        yield module
    AcceleratorState._reset_state(reset_partial_state=True)
    if dist.is_initialized():  # by accelerate
        dist.destroy_process_group()


def test_all_sides_train_the_same_model_on_the_same_batches(hf, import_benchmark):
    zoo_run = import_benchmark("zoo_run")
    hf.SIDES["hf"] = zoo_run.Side(hf.preset)
    names = [name for name in hf.sides() if name != "trainer_liger"]  # Liger's kernels need a GPU
    assert {"hf", "gpt", "trainer"} <= {*names}
    found = {
        name: zoo_run.run(hf.LINES["1B_4096_b4"], hf.SIDES[name], tiny=True, limit=200, blocks=(2, 0.0))
        for name in names
    }
    for side, run in found.items():
        assert "error" not in run, (side, run["error"])
        assert run["losses"][:8] == pytest.approx(found["hf"]["losses"][:8], rel=1e-3), side
        assert run["step_ms"] > 0
    assert found["hf"]["losses"][0] != found["hf"]["losses"][4]  # the same batch again


def test_report_has_tokens_and_ratios(hf):
    common = {"line": "1B_4096_b4", "losses": [12.0, 11.0], "peak_gib": 40.0}
    runs = [
        {**common, "side": side, "step_ms": ms, "blocks_ms": [ms - 1, ms + 1], "first_step_s": first}
        for side, ms, first in (("hf", 256.0, 40.0), ("trainer", 400.0, 50.0), ("hf", 256.0, 9.0))
    ]
    runs.append({**common, "side": "trl", "error": "...", "error_line": "E: no"})
    records = {"call": [{"cards": ["X"]}], "run": runs}
    row = hf.summary(records)["1B_4096_b4"]["trainer"]
    assert (row["tokens_per_s"], row["hf_over"]) == pytest.approx((40960, 400 / 256))
    text = hf.report(records)
    assert "| 1B_4096_b4 | hf | 64000 | 63751 to 64251 | 2 | 1.000 | 40.0 | 40.0 | 12.0000 to 11.5000 |" in text
    assert "| 1B_4096_b4 | trl | E: no |" in text
