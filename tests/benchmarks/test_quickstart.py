import json

import pytest


@pytest.fixture
def quickstart(import_benchmark):
    return import_benchmark("quickstart")


def test_ratios_are_of_medians(quickstart):
    def result(case, speed):
        return {"case": case, "tok_s": speed}

    runs = [result("bare 1", 100), result("trainer, graphs 1", 90), result("bare 2", 120), result("bare 3", 400)]
    found = quickstart.summary([*runs, {"case": "trainer 1", "error": "out of memory"}])
    assert found["bare"] == {"median_tok_s": 120, "spread": 2.5, "runs": [100, 120, 400]}
    assert found["trainer, graphs"]["ratio_to_bare"] == 0.75
    assert "trainer" not in found


def test_without_the_bare_loop_there_is_no_ratio(quickstart):
    assert "ratio_to_bare" not in quickstart.summary([{"case": "trainer 1", "tok_s": 5}])["trainer"]


def test_speed_counts_what_is_predicted(quickstart, monkeypatch):
    monkeypatch.setattr(quickstart, "STEPS", 10)
    found = quickstart.figures([1.0, 3.0], (4, 9))
    assert (found["tokens_a_step"], found["tok_s"], found["step_ms"]) == (32, 160, 200.0)


@pytest.mark.slow
def test_both_sides_run_at_the_same_shapes(run_benchmark, tmp_path):
    done = run_benchmark("quickstart", "--cases", "bare 1", "trainer 1", "--output", "out", UPS_BENCH_STEPS="2")
    assert json.loads(done.stdout.splitlines()[-1])["trainer"]["ratio_to_bare"] > 0, done.stderr
    bare, trainer = json.loads((tmp_path / "out" / "result.json").read_text())
    assert bare["tokens_a_step"] == trainer["tokens_a_step"] == 8 * 256
    assert (tmp_path / "out" / "log.txt").exists()
