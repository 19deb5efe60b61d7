import json

import pytest
import torch

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def pde(import_benchmark, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    module = import_benchmark("pde")
    module.load()
    return module


@pytest.mark.parametrize("line", ["10M_b4", "10M_b4_rollout4", "10M_b4_rollout4_detached"])
def test_a_loop_without_lightning_has_the_losses_of_stock(pde, import_benchmark, line):
    run = import_benchmark("zoo_run").run
    stock, hand = (
        run(pde.LINES[line], pde.SIDES[side], tiny=True, limit=200, blocks=(2, 0.0)) for side in ("stock", "hand")
    )
    assert "error" not in hand, hand
    assert hand["losses"][:8] == pytest.approx(stock["losses"][:8], rel=1e-3)
    assert hand["losses"][0] != hand["losses"][4]  # the same batch again
    assert (hand["unchanged"], hand["step_ms"] > 0) == (stock["unchanged"], True)


def test_a_step_graph_has_the_losses_of_the_preset_without_it(pde, import_benchmark):
    run = import_benchmark("zoo_run").run
    plain, graph = (
        run(pde.LINES["10M_b4"], pde.SIDES[side], tiny=True, limit=200, blocks=(2, 0.0))
        for side in ("precision", "step_graph_eager")
    )
    assert "error" not in graph, graph
    assert graph["losses"][:8] == pytest.approx(plain["losses"][:8], rel=1e-3)


def test_ratios_are_of_medians_over_rounds(pde):
    times = {"stock": (40.0, 44.0, 42.0), "preset": (10.0, 12.0, 11.0), "hand": (22.0, 21.0), "hand_compile": (10.0,)}
    common = {"line": "10M_b4", "losses": [1.0], "first_step_s": 2.0, "peak_gib": 3.0}
    runs = [
        {**common, "side": side, "step_ms": ms, "round": turn}
        for side, each in times.items()
        for turn, ms in enumerate(each)
    ]
    failed = {**common, "side": "float8", "error": "...", "error_line": "E: no"}
    records = {"call": [{"cards": ["X"]}], "run": [*runs, failed]}
    row = pde.summary(records)["10M_b4"]["preset"]
    assert (row["over_stock"], row["over_hand"]) == pytest.approx((42 / 11, 10 / 11))
    text = pde.report(records)
    assert "| 10M_b4 | preset | 11.000 | 18.2% of 3 | 3.82 | 0.91 | 3.00 | 2.00 |" in text
    assert "| 10M_b4 | float8 | E: no |" in text


@pytest.mark.slow
def test_runs_through_the_command(run_benchmark, tmp_path):
    words = ("--tiny", "--only", "10M_b4", "30M_b24", "--sides", "hand", "--output", "pde.jsonl", "--budget", "200")
    done = run_benchmark("pde", *words, OMP_NUM_THREADS="1")
    _, *runs = map(json.loads, (tmp_path / "pde.jsonl").read_text().splitlines())
    assert [(run["line"], run["side"]) for run in runs] == [("10M_b4", "hand"), ("30M_b24", "hand")], done.stdout
    assert "all runs are made" in done.stdout
    assert "| 30M_b24 | hand |" in done.stdout
