import pytest
import torch

from lightning_ups.insight.throughput.timeline import EventClock, Timeline


class Device:
    """A clock that ticks once at each mark, and is some marks behind."""

    def __init__(self, behind=0):
        self.now, self.behind, self.done = 0, behind, False
        self.free = []

    def mark(self):
        self.now += 1
        return self.now

    def passed(self, mark):
        return self.done or mark <= self.now - self.behind

    def seconds(self, first, second):
        assert self.passed(second)
        return second - first

    def release(self, marks):
        self.free += marks

    def wait(self):
        self.done = True


def step(timeline, *phases, note=None):
    timeline.step(note)
    for phase in phases:
        timeline.enter(phase)
        timeline.leave()


def test_a_step_is_the_sum_of_its_phases():
    timeline = Timeline(Device(), late=0)
    step(timeline, "data", "forward")
    timeline.end("note")
    (found,) = timeline.read()
    assert found.split == {"other": 3, "data": 1, "forward": 1}
    assert (found.seconds, found.number, found.note, found.pauses) == (5, 0, "note", {})


def test_time_belongs_to_the_innermost_phase():
    timeline = Timeline(Device(), late=0)
    timeline.step()
    timeline.enter("optimizer")
    timeline.enter("forward")
    timeline.leave()
    timeline.leave()
    timeline.end()
    (found,) = timeline.read()
    assert found.split == {"other": 2, "optimizer": 2, "forward": 1}


@pytest.mark.parametrize("split_every", [1, 7])
def test_pauses_are_no_part_of_a_step(split_every):
    timeline = Timeline(Device(), split_every=split_every, late=0)
    step(timeline)
    step(timeline)
    timeline.enter("validation")
    timeline.enter("checkpoint")
    timeline.leave()
    timeline.leave()
    timeline.end()
    _, found = timeline.read()
    assert found.pauses == {"validation": 2, "checkpoint": 1}
    assert found.seconds == 2


def test_only_some_steps_are_split_and_all_have_a_length():
    timeline = Timeline(Device(), split_every=3, late=0)
    for _ in range(7):
        step(timeline, "data")
    timeline.end()
    found = [*timeline.read()]
    assert [each.split is not None for each in found] == [True, False, False, True, False, False, True]
    assert [each.seconds for each in found] == [3, 1, 1, 3, 1, 1, 3]


def test_a_step_is_read_when_the_device_has_passed_it_and_no_sooner():
    device = Device(behind=3)
    timeline = Timeline(device, late=0)
    for _ in range(4):
        step(timeline)
    assert [found.number for found in timeline.read()] == []
    step(timeline)
    assert [found.number for found in timeline.read()] == [0]
    assert [found.number for found in timeline.finish()] == [1, 2, 3]
    assert device.done


def test_a_step_that_is_dropped_counts_for_nothing():
    device = Device()
    timeline = Timeline(device, late=0)
    step(timeline)
    step(timeline, "data")
    timeline.drop()
    assert not timeline.running
    assert [found.number for found in timeline.read()] == [0]
    assert 2 not in device.free[: device.free.index(1)]


def test_marks_are_given_back_once_each():
    device = Device()
    timeline = Timeline(device, late=0)
    for _ in range(5):
        step(timeline, "data", "forward")
        [*timeline.read()]
    assert len(device.free) == len(set(device.free))
    assert len(device.free) >= 4 * 5


@pytest.mark.gpu(count=1)
def test_events_measure_the_devices_time_and_wait_for_nothing():
    clock = EventClock()
    a = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    first = clock.mark()
    for _ in range(50):
        a = (a @ a).clamp(-1, 1)
    second = clock.mark()
    assert not clock.passed(second)  # the host is far ahead
    clock.wait()
    assert clock.passed(second)
    assert clock.seconds(first, second) > 1e-3


def test_between_two_steps_pauses_are_timed_and_nothing_is_a_step():
    timeline = Timeline(Device(), late=0)
    step(timeline, "data")
    timeline.rest("first")  # marks 1 to 4
    timeline.enter("checkpoint")
    timeline.leave()
    step(timeline, "data")
    timeline.end("second")
    first, between, second = timeline.read()
    assert (first.number, first.note, first.seconds) == (0, "first", 3)
    assert (between.between, between.note, between.split) == (True, None, None)
    assert (between.pauses, between.seconds) == ({"checkpoint": 1}, 2)
    assert (second.number, second.note, second.seconds) == (1, "second", 3)
    assert not first.between
    assert not second.between
