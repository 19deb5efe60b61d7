from types import SimpleNamespace

import pytest


@pytest.fixture
def benchmark_(import_benchmark):
    return import_benchmark("device_prefetch")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", ["64 MiB, ready", "64 MiB, workers", "1 MiB, ready", "1 MiB, workers"])
def test_every_case_trains_both_ways_and_compares_the_losses(benchmark_, case):
    assert case in benchmark_.CASES
    found = benchmark_.CASES[case]()
    assert found["losses_equal"] is True
    assert found["plain_ms"] > 0
    assert found["prefetch_ms"] > 0
    assert [len(times) for times in found["steps_ms"].values()] == [benchmark_.ROUNDS] * 2


def test_losses_that_differ_are_found(benchmark_, monkeypatch):
    runs = iter(range(100))

    def trained(*_):
        return {"step_ms": 1.0, "peak_gib": 0.0, "losses": [float(next(runs) == 3)]}

    monkeypatch.setattr(benchmark_, "trained", trained)
    assert benchmark_.compared(1, "ready")["losses_equal"] is False


def test_shared_memory_that_is_too_small_is_said_before_anything_runs(benchmark_, monkeypatch):
    monkeypatch.setattr(benchmark_, "ON_GPU", True)
    monkeypatch.setattr(benchmark_, "disk_usage", lambda _: SimpleNamespace(free=64 * 2**20))
    assert "'64 MiB, workers' needs 400 MiB of /dev/shm, which has 64" in benchmark_.unmet(benchmark_.CASES)
    assert benchmark_.unmet(["64 MiB, ready", "1 MiB, workers"]) is None
