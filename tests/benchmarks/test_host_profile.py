import json

import pytest


@pytest.fixture
def host_profile(import_benchmark):
    return import_benchmark("host_profile")


def test_steps_are_timed_as_they_are_and_then_profiled(host_profile, monkeypatch):
    told = []
    monkeypatch.setattr(host_profile, "tell", lambda found: told.append(found))
    monkeypatch.setattr(host_profile, "PLAIN", 5)
    monkeypatch.setattr(host_profile, "PROFILED", 3)
    clocks = {"perf_counter": 0.0, "thread_time": 0.0, "process_time": 0.0}
    for name in clocks:
        monkeypatch.setattr(host_profile.time, name, lambda name=name: clocks[name])
    stopwatch = host_profile.Stopwatch(first=4)

    def work_of_step():
        return None

    for step in range(4 + 5 + 3):
        stopwatch.begin_step()
        assert not told
        for name, seconds in zip(clocks, (7e-3, 4e-3, 6e-3), strict=True):
            clocks[name] += seconds if step >= 4 else 1.0  # a compilation
        work_of_step()
    stopwatch.begin_step()
    (found,) = told
    assert (found["step_ms"], found["thread_ms"], found["process_ms"]) == (7, 4, 6)
    (line,) = [line for line in found["profile"]["tottime"].splitlines() if "work_of_step" in line]
    assert line.split()[0] == "3", "only those after the ones that are timed"


def test_a_row_of_several_gpus_is_refused(run_benchmark):
    result = run_benchmark("host_profile", "--row", "8B")
    assert result.returncode == 2
    assert "row 8B is of 4 GPUs, and this profiles one process" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_both_sides_on_a_cpu(run_benchmark, tmp_path):
    result = run_benchmark("host_profile", "--row", "tiny", "--sides", "ours", "bare", "--output", "out")
    assert result.returncode == 0, result.stderr
    kept = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert [each["side"] for each in kept] == ["ours", "bare"]
    assert all(0 < each["thread_ms"] <= 1.2 * each["step_ms"] for each in kept)
    assert all(f"| {each['side']} | {each['step_ms']} |" in result.stdout for each in kept)
    assert "training_epoch_loop" in (tmp_path / "out" / "ours_cumulative.txt").read_text()
    assert "training_epoch_loop" not in (tmp_path / "out" / "bare_cumulative.txt").read_text()
