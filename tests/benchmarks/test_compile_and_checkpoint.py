import json

import pytest


@pytest.mark.slow
def test_recomputing_saves_less_and_changes_no_loss(run_benchmark, tmp_path):
    cases = ["eager", "eager + nothing", "compile model"]
    done = run_benchmark("compile_and_checkpoint", "--cases", *cases, "--output", "out", UPS_BENCH_SIZE="tiny")
    found = {one["case"]: one for one in json.loads((tmp_path / "out" / "result.json").read_text())}
    assert [*found] == cases, done.stderr
    assert found["eager + nothing"]["backward_tflop"] >= found["eager"]["backward_tflop"]
    assert found["eager + nothing"]["losses"] == pytest.approx(found["eager"]["losses"], rel=1e-6)
    assert found["compile model"]["losses"] == pytest.approx(found["eager"]["losses"], rel=1e-2)
    assert found["compile model"]["report"]["Compile"]["lines"]
