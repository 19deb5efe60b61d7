import json
import sys

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

    class Work:
        def of_step(self, seconds):
            for name, share in zip(clocks, (7, 4, 6), strict=True):
                clocks[name] += seconds * share

    monkeypatch.setattr(host_profile, "PARTS", {"work": (Work, "of_step")})
    work, of_step = Work(), Work.of_step
    with stopwatch.times_parts():
        for step in range(4 + 5 + 3):
            stopwatch.begin_step()
            assert not told
            work.of_step(1.0 if step < 4 else 0.5e-3)  # a compilation; the second of two in a step is none
            if step >= 4:
                work.of_step(0.1e-3 if step == 6 else 0.5e-3 if step < 9 else 2.0)
        stopwatch.begin_step()
    assert Work.of_step is of_step
    (found,) = told
    assert (found["step_ms"], found["thread_ms"], found["process_ms"]) == (7, 4, 6)
    assert (found["step_ms_fastest"], found["thread_ms_fastest"], found["process_ms_fastest"]) == (4.2, 2.4, 3.6)
    assert found["step_ms_all"] == [7, 7, 4.2, 7, 7]
    assert found["parts_ms"] == {"work": 7}
    (line,) = [line for line in found["profile"]["tottime"].splitlines() if "of_step" in line and "timed" not in line]
    assert line.split()[0] == "6", "only those after the ones that are timed"


def test_a_row_of_several_gpus_is_refused(host_profile, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["host_profile.py", "--row", "8B"])
    with pytest.raises(SystemExit, match="2"):
        host_profile.main()
    assert "row 8B is of 4 GPUs, and this profiles one process" in capsys.readouterr().err


@pytest.mark.slow
def test_both_sides_on_a_cpu(run_benchmark, tmp_path):
    result = run_benchmark("host_profile", "--row", "tiny", "--sides", "ours", "bare", "--output", "out")
    assert result.returncode == 0, result.stderr
    kept = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert [each["side"] for each in kept] == ["ours", "bare"]
    assert all(0 < each["thread_ms"] <= 1.2 * each["step_ms"] for each in kept)
    assert all(f"| {each['side']} | {each['step_ms']} |" in result.stdout for each in kept)
    assert all(
        0 < each["parts_ms"]["backward"] + each["parts_ms"]["writes of others"] < each["step_ms"] for each in kept
    )
    assert "training_epoch_loop" in (tmp_path / "out" / "ours_cumulative.txt").read_text()
    assert "training_epoch_loop" not in (tmp_path / "out" / "bare_cumulative.txt").read_text()
