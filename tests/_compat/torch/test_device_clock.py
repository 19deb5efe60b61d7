import pytest
import torch

from lightning_ups._compat.torch.device_clock import CudaClock


class Event:
    """An event of a device whose clock is the number of cycles that it was told to spin, a million to a millisecond."""

    def __init__(self, device):
        self._device = device

    def record(self, stream):
        self.at = self._device["cycles"] / 1e6

    def elapsed_time(self, other):
        return other.at - self.at


def test_a_hold_is_as_long_as_asked(monkeypatch):
    device = {"cycles": 0}
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(device))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: device.update(cycles=device["cycles"] + cycles))
    clock = CudaClock(torch.device("cuda", 0))
    clock.hold(1.0)  # which finds out how long a cycle is
    start = clock.mark()
    clock.hold(7.5)
    assert clock.between(start, clock.mark()) == pytest.approx(7.5)


def test_a_device_that_was_idle_is_woken_first(monkeypatch):
    device = {"cycles": 0.0}  # a million to a millisecond, and in the first 30 it does but a fifth

    def sleep(cycles):
        slow = min(cycles, max(0, 6e6 - device["work"]))
        device["work"] += cycles
        device["cycles"] += 5 * slow + cycles - slow

    device["work"] = 0.0
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(device))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "_sleep", sleep)
    clock = CudaClock(torch.device("cuda", 0))
    clock.wake()
    start = clock.mark()
    clock.hold(7.5)
    assert clock.between(start, clock.mark()) == pytest.approx(7.5)


def test_the_hosts_time_is_in_milliseconds(monkeypatch):
    monkeypatch.setattr("time.perf_counter", iter([1.0, 1.25]).__next__)
    clock = CudaClock(torch.device("cuda", 0))
    assert -(clock.now() - clock.now()) == pytest.approx(250)


@pytest.mark.gpu
def test_work_behind_a_hold_waits_and_its_time_is_its_own():
    clock = CudaClock(torch.device("cuda", torch.cuda.current_device()))
    x = torch.randn(2048, 2048, device="cuda")
    clock.hold(1.0)
    x @ x  # which loads libraries
    clock.wait()
    before = clock.now()
    clock.hold(200.0)
    start = clock.mark()
    x @ x
    assert not clock.passed(start)
    end = clock.mark()
    clock.wait()
    assert clock.passed(end)
    assert 50 < clock.now() - before < 5000  # other processes may use the device as well
    assert 0 < clock.between(start, end) < 100
    assert clock.allocated() >= x.nbytes
    assert 0 < clock.room() <= torch.cuda.get_device_properties(0).total_memory
