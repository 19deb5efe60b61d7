from contextlib import contextmanager

import pytest
import torch

from lightning_ups.callbacks.logs.measured import close_look
from lightning_ups.callbacks.logs.measured.close_look import CloseLook, can_look_at


@pytest.fixture
def seen(monkeypatch):
    events = []

    class Kernels:
        def start(self):
            events.append("kernels")

        def mark(self):
            events.append("mark")

        def stop(self):
            events.append("end of kernels")
            return [("gemm", 0.0, 60.0), ("gemm", 80.0, 100.0)]

    @contextmanager
    def waits(counts):
        events.append("waits")
        counts["a.py:1 (step)"] += 3
        yield
        events.append("end of waits")

    monkeypatch.setattr(close_look, "Kernels", Kernels)
    monkeypatch.setattr(close_look, "watched_waits", waits)
    return events


def test_waits_come_first_and_kernels_after(seen):
    found = []
    look = CloseLook(found.append)
    assert seen == ["waits"]
    look = look.next()
    assert seen[1:] == ["end of waits", "kernels"]
    look = look.next()
    assert seen[3:] == ["mark"]  # ranks have met
    look = look.next()
    assert look is not None
    assert look.next() is None
    assert seen[4:] == ["mark", "end of kernels"]
    assert found[0].idle == pytest.approx(0.2)
    assert found[0].seconds == pytest.approx(50e-6)
    assert found[0].waits == (("a.py:1 (step)", 3),)


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_a_look_may_end_early(seen, steps):
    found = []
    look = CloseLook(found.append)
    for _ in range(steps):
        look = look.next()
    look.cancel()
    look.cancel()
    assert found == []
    assert seen.count("waits") == seen.count("end of waits") == 1
    assert seen.count("kernels") == seen.count("end of kernels")


def test_only_gpus_can_be_looked_at_and_by_one(monkeypatch):
    assert not can_look_at(torch.device("cpu"))
    assert can_look_at(torch.device("cuda"))
    monkeypatch.setattr(close_look, "is_profiled", lambda: True)
    assert not can_look_at(torch.device("cuda"))
