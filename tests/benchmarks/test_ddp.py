import json

import pytest
import torch

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def ddp(import_benchmark, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return import_benchmark("ddp")


def test_rounds_alternate_and_the_most_telling_cases_come_first(ddp):
    names = [*ddp.made()]
    assert names[:3] == ["10M_b4, graphs, one 1", "10M_b4, graphs, tuned_ddp 1", "10M_b4, graphs, ddp 1"]
    assert names[12] == "10M_b4, graphs, one 2"
    assert len(names) == len(ddp.SHAPES) * sum(map(len, ddp.WAYS.values())) * ddp.ROUNDS


def test_what_a_folder_has_is_left_out(ddp, tmp_path):
    done = [{"case": "a 1", "step_ms": 2.0}, {"case": "b 1", "error": "no"}]
    (tmp_path / "result.json").write_text(json.dumps(done))
    words = ["--output", str(tmp_path)]
    assert [*ddp.left(dict.fromkeys(["a 1", "b 1", "c 1"]), words)] == ["b 1", "c 1"]
    assert [*ddp.left({"a 1": None}, ["--case", "a 1", *words])] == ["a 1"]


def test_the_efficiency_compares_medians_with_one_gpu(ddp):
    times = {"one": (8.0, 8.2), "ddp": (9.0, 9.0)}
    results = [
        {"case": f"10M_b4, graphs, {strategy} {turn}", "step_ms": ms}
        for strategy, each in times.items()
        for turn, ms in enumerate(each)
    ]
    found = ddp.summary([*results, {"case": "30M_b4, graphs, ddp 1", "step_ms": 3.0}])
    assert found["10M_b4, graphs, ddp"] == {"step_ms": 9.0, "rounds": 2, "speedup": 1.8, "efficiency": 0.9}
    assert found["30M_b4, graphs, ddp"] == {"step_ms": 3.0, "rounds": 1}


@pytest.mark.slow
def test_two_ranks_run_through_the_command(run_benchmark, tmp_path):
    cases = [f"10M_b4, {kind} 1" for kind in ("eager, one", "compiled, tuned_ddp", "preset, fsdp2")]
    done = run_benchmark("ddp", "--output", "out", "--cases", *cases, OMP_NUM_THREADS="1")
    found = json.loads(done.stdout.splitlines()[-1])
    assert [*found] == [case[:-2] for case in cases], done.stdout
    assert json.loads((tmp_path / "out" / "summary.json").read_text()) == found
