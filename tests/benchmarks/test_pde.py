import json

import pytest
import torch


@pytest.fixture
def pde(import_benchmark, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # where sizes are those that are measured
    return import_benchmark("pde")


def test_ratios_are_of_medians(pde):
    runs = [{"case": f"{kind} {turn}", "fields_s": speed} for kind, turn, speed in (
        ("stock", 1, 10.0), ("ours, prefetch", 1, 30.0), ("stock", 2, 20.0), ("ours, prefetch", 2, 33.0),
    )]  # fmt: skip
    found = pde.summary([*runs, {"case": "ours 1", "error": "out of memory"}])
    assert found["stock"] == {"fields_s": 15.0, "spread": 0.6667, "ratio": 1.0}
    assert found["ours, prefetch"]["ratio"] == 2.1
    assert "ours" not in found


@pytest.mark.filterwarnings("ignore")  # of Lightning, about loaders
def test_all_train_on_the_same_batches(pde):
    stock, ours = pde.trained(precision="bf16-mixed"), pde.ours()
    assert len(stock["losses"]) == pde.WARM + pde.STEPS
    assert ours["losses"] == stock["losses"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_case_runs_on_a_cpu(pde, run_benchmark, tmp_path):
    cases = [f"{kind} 1" for kind in pde.KINDS]
    done = run_benchmark("pde", "--cases", *cases, "--output", "out")
    found = json.loads(done.stdout.splitlines()[-1])
    assert {*found} == {*pde.KINDS}
    results = json.loads((tmp_path / "out" / "result.json").read_text())
    assert next(r for r in results if r["case"] == "ours, float8 1")["converted"] > 20
