import json
import re

import pytest
import torch

from lightning_ups.transforms.compile.mode import PACED_STEPS, Pace, Timing, choose, is_open, measure, together, unfit
from tests.clocks import Machine


def timing(launch, device, *, saved=0, output=0, room=2**33, peak=2**34, step=None):
    return Timing(
        launch_ms=launch,
        device_ms=device,
        saved_bytes=saved,
        output_bytes=output,
        room=room,
        peak=peak,
        step_ms=step,
    )


def test_the_devices_own_time_is_told_from_the_time_it_waits():
    timing = measure(machine := Machine(kernels=50, host=0.05, device=0.02), machine)
    assert timing.launch_ms == pytest.approx(2 * 50 * 0.05)
    assert timing.device_ms == pytest.approx(2 * 50 * 0.02)  # and not the five milliseconds between its events


def test_a_device_that_was_idle_while_the_model_was_compiled_is_not_taken_for_a_slow_one():
    timing = measure(machine := Machine(kernels=50, host=0.05, device=0.02, sleepy=100.0), machine)
    assert timing.device_ms == pytest.approx(2 * 50 * 0.02)


def test_a_device_that_is_far_behind_is_timed_once():
    timing = measure(machine := Machine(kernels=50, host=0.01, device=1.0), machine)
    assert timing.launch_ms == pytest.approx(2 * 50 * 0.01)
    assert timing.device_ms == pytest.approx(100, rel=0.01)
    assert machine.held == 0
    assert machine.passes == 4  # one forward and backward for their memory, and one for their time


def test_what_is_slow_at_first_or_once_does_not_count():
    slow = {0: 100.0, 1: 100.0, 2: 100.0, 3: 100.0, 8: 30.0}
    timing = measure(machine := Machine(kernels=50, host=0.05, device=0.02, slow=slow), machine)
    assert timing.launch_ms == pytest.approx(2 * 50 * 0.05)
    assert timing.device_ms == pytest.approx(2 * 50 * 0.02)


def test_a_device_that_was_not_held_for_long_enough_is_held_for_longer():
    timing = measure(machine := Machine(kernels=50, host=0.05, device=0.02, holding=0.2), machine)
    assert timing.device_ms == pytest.approx(2 * 50 * 0.02)
    assert machine.held > 6


def test_more_kernels_than_a_queue_takes_are_timed_one_by_one():
    timing = measure(machine := Machine(kernels=300, host=0.05, device=0.02, queue=20), machine)
    assert timing.device_ms == pytest.approx(2 * 300 * 0.02)
    assert choose(timing).graphs


@pytest.mark.parametrize("machine", [{"kernels": 300, "waits": True}, {"kernels": 50}], ids=["waits", "few kernels"])
def test_what_waits_for_the_device_is_not_recorded(machine):
    timing = measure(machine := Machine(host=0.05, device=0.02, queue=20, **machine), machine)
    assert timing.device_ms is None
    choice = choose(timing)
    assert not choice.graphs
    assert "its own time is not known" in str(choice)


@pytest.mark.parametrize(
    ("timing", "why"),
    [
        (timing(4.0, 2.0), None),
        (timing(4.0, None), "its own time is not known"),
        (timing(4.0, 2.0, output=2**33), "copies of what it returns would take 16384 MiB beside 16384"),
        (timing(4.0, 2.0, output=2**28), None),
        (timing(4.0, 2.0, output=2**24, peak=2**20), None),  # next to nothing
    ],
)
def test_some_graphs_are_not_recorded_whatever_else_runs(timing, why):
    said = unfit(timing)
    assert said == why or why in said


def test_graphs_of_one_step_are_timed_together():
    one, other = timing(4.0, 2.0, saved=3, output=5, room=90), timing(1.0, 0.5, saved=2, output=1, room=80)
    assert together([one, other, other]) == timing(6.0, 3.0, saved=7, output=7, room=80)
    assert together([one, timing(1.0, None)]).device_ms is None


def test_memory_is_counted_but_for_what_is_the_inputs():
    inputs = torch.zeros(2**10)
    machine = Machine(inputs=(inputs,), returned=torch.zeros(2**12))
    assert measure(machine, machine).output_bytes == 2**14
    timing = measure(same := Machine(inputs=(inputs,), returned=inputs[:3]), same)
    assert timing.output_bytes == 0
    assert (timing.saved_bytes, timing.room) == (3 * 2**20, 2**33)


@pytest.mark.parametrize(
    ("timing", "graphs", "said"),
    [
        (timing(6.12, 5.2), True, "CUDA graphs, since launching takes 6.12 ms and the device 5.2"),
        (timing(4.0, 5.2), True, "CUDA graphs, since launching takes 4 ms and the device 5.2"),  # more than 3/4
        (timing(3.8, 5.2), False, "default, since launching takes 3.8 ms and the device 5.2"),
        (timing(9, 250), False, "default, since launching takes 9 ms and the device 250"),
        (
            timing(3.86, 6.37, step=8.2),
            True,
            "CUDA graphs, since launching takes 3.86 ms, the device 6.37, and the host 8.2",
        ),
        # The host is hardly faster than the device, which then waits now and then: whole steps are compared afterwards.
        (timing(3.86, 6.37, step=6.5), True, "CUDA graphs, since launching .* the host 6.5 for a whole step"),
        (timing(9.04, 13.8, step=12.1), True, "CUDA graphs"),  # PatchTST, which is 9 % faster with them
        (timing(3.86, 6.37, step=5.3), False, "default, since launching .* the host 5.3 for a whole step"),
        (timing(1.5, 6.37, step=6.5), False, "default"),
        (timing(3.86, 6.37, step=6.5, output=2**27), False, "default"),
        (timing(2.0, 6.0, step=20.0), True, "CUDA graphs"),  # the device waits all the same, for less long
        (timing(0.3, 6.0, step=20.0), False, "default"),
        (timing(8, 5, output=2**30), True, "CUDA graphs.* and 2 more for copies of what the model returns"),
        (timing(6, 5, output=2**30), False, "default.* and 2 more for copies of what the model returns"),
        (timing(6, 5, step=8.0, output=2**30), True, "CUDA graphs"),
        (timing(6, 5, step=7.0, output=2**30), False, "default, since launching takes"),
        (timing(3.8, 6.0, step=9.0, output=2**30), True, "CUDA graphs"),
        (timing(3.8, 6.0, step=9.0, output=2 * 2**30), False, "default, since launching takes"),
        (timing(8, 5, output=2**30, room=2**31), False, "default, since a graph would keep 1024 MiB"),
        (timing(6, 5, output=64 * 2**20), True, "CUDA graphs"),
        (timing(6, 5, saved=2**30, room=2**31), False, "default, since a graph would keep 1024 MiB.*2048 MiB are free"),
        (timing(6, 5, saved=2**29, room=2**31), True, "CUDA graphs"),
        (timing(60, None), False, "default, since the device did not wait while 60 ms"),
    ],
)
def test_graphs_are_chosen_where_launching_takes_longer_and_nothing_forbids_them(timing, graphs, said):
    choice = choose(timing)
    assert choice.graphs is graphs
    assert str(choice).startswith("mode auto: ")
    assert re.search(said, str(choice))
    assert choice.facts["mode"] == ("reduce-overhead" if graphs else "default")
    assert choice.facts["launch_ms"] == timing.launch_ms
    json.dumps(choice.facts)


@pytest.mark.parametrize(
    ("timing", "expected"),
    [
        (timing(3.86, 6.37), True),
        (timing(3.86, 6.37, step=8.2), False),
        (timing(6.0, 6.37), False),
        (timing(1.0, 6.37), False),
        (timing(3.86, None), False),
        (timing(3.86, 6.37, saved=2**32), False),
    ],
)
def test_whole_steps_are_timed_only_where_the_choice_depends_on_them(timing, expected):
    assert is_open(timing) is expected


def test_the_pace_is_the_hosts_and_not_the_devices():
    machine = Machine(kernels=50, host=0.05, device=1.0)  # the device falls behind with every kernel
    pace, found, steps = Pace(machine), None, 0
    while found is None:
        found = pace.begin_step()
        machine.backward(machine.forward())
        steps += 1
    assert found == pytest.approx(2 * 50 * 0.05)
    assert steps == PACED_STEPS + 1
