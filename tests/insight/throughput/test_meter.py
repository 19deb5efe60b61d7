import tracemalloc

import pytest
import torch

from lightning_ups.insight.throughput.meter import (
    Flops,
    Meter,
    RankTimes,
    Span,
    Summary,
    inspect_spans,
    kind_of,
    quantile,
)
from lightning_ups.insight.throughput.timeline import StepTime


def step(number, seconds=0.5, *, units=10.0, split=None, pauses=None):
    return StepTime(number, seconds, split, pauses or {}, units)


def test_steps_of_the_warmup_and_those_without_a_note_do_not_count():
    meter = Meter(warmup_steps=2)
    for each in (step(0), step(1), step(2), step(3, units=None), step(4)):
        meter.add(each)
    assert (len(meter.seconds), meter.units, meter.total_s) == (2, 20, 1.0)
    assert [*meter.numbers] == [2, 4]


def test_a_window_has_the_steps_since_the_last_one():
    meter = Meter(warmup_steps=0)
    meter.add(step(0))
    assert meter.window()["units_per_s"] == 20
    assert meter.window() == {}
    meter.add(step(1, 1.0))
    meter.add(step(2, 3.0, split={"data": 1.0, "forward": 2.0}))
    window = meter.window()
    assert (window["units_per_s"], window["step_ms"], window["step_p95_ms"]) == (5, 2000, 3000)
    assert (window["data_ms"], window["forward_ms"], window["backward_ms"]) == (1000, 2000, 0)


def test_devices_that_share_a_batch_share_its_units():
    meter = Meter(warmup_steps=0, share=0.5, replicas=2)  # four devices, two of which split each matrix
    meter.add(step(0))
    window = meter.window()
    assert window["units_per_s"] == 40
    assert window["units_per_s_per_device"] == 10


def test_shares_are_of_the_steps_that_were_split():
    meter = Meter(warmup_steps=0)
    meter.add(step(0, 1.0, split={"data": 0.25, "forward": 0.75}))
    meter.add(step(1, 9.0))
    shares = meter.shares()
    assert (shares["data"], shares["forward"], shares["optimizer"]) == (0.25, 0.75, 0.0)
    assert Meter(warmup_steps=0).shares() == {}


@pytest.mark.parametrize(("units", "uneven"), [(10.0, 0.5), (10.5, 0.5), (12.0, 0.0)])
def test_uneven_time_is_known_for_steps_of_equal_size(units, uneven):
    meter = Meter(warmup_steps=1)
    assert meter.uneven == 0.0
    for number, seconds in enumerate((9.0, 1.0, 1.0, 1.0, 1.0, 6.0)):
        meter.add(step(number, seconds, units=units if number == 5 else 10.0))
    assert meter.uneven == uneven


def test_a_count_may_be_a_tensor():
    meter = Meter(warmup_steps=0)
    meter.add(step(0, units=torch.tensor(7)))
    assert meter.units == 7
    assert meter.window()["units_per_s"] == 14


def test_utilisation_is_operations_by_what_the_device_can_do():
    flops = Flops(model=6e9, hardware=8e9, peak=1e15)
    assert flops.utilisation(1e5) == {"mfu": pytest.approx(0.6), "hfu": pytest.approx(0.8)}
    assert Flops(model=6e9, hardware=8e9).utilisation(1e5) == {}


def test_the_part_in_fp8_is_held_against_fp8s_peak():
    flops = Flops(model=6e9, hardware=6e9, low_precision=4e9, peak=1e15, low_precision_peak=2e15)
    # 2e9 take 2 us at the peak of bf16, 4e9 take 2 us at that of fp8: at 2.5e5 units/s, all of the time.
    found = flops.utilisation(2.5e5)
    assert found["mfu_mixed"] == pytest.approx(1.0)
    assert found["mfu"] == pytest.approx(1.5)


@pytest.mark.parametrize(("share", "value"), [(0.0, 1), (0.5, 5), (0.95, 10), (0.9, 9), (1.0, 10)])
def test_quantiles(share, value):
    assert quantile(range(1, 11), share) == value


def rank(forward):
    split = {"data": 0.1, "forward": forward, "backward": 9.0}
    return RankTimes(steps=1, seconds=10.0, units=10.0, split=split, split_seconds=10.0)


def summary(**settings):
    return Summary(**{"unit": "tokens", "device": "d", "num_devices": 4, "steps": 5, "warmup_steps": 0} | settings)


def test_the_slowest_rank_is_the_one_that_works_longest_itself():
    found = summary(ranks=[rank(0.9), rank(0.9), rank(1.4), rank(0.9)]).slowest_rank
    assert found == (2, pytest.approx(0.5))
    two, alone = summary(ranks=[rank(0.9), rank(1.9)]), summary(ranks=[rank(1.0)])
    assert two.slowest_rank == (1, pytest.approx(1.0))  # twice as long
    assert two.waited_for == pytest.approx(0.1)  # one second in ten
    assert (alone.slowest_rank, alone.waited_for) == (None, 0)


def test_steps_that_are_never_logged_take_next_to_no_memory():
    meter = Meter(warmup_steps=0)
    tracemalloc.start()
    for number in range(20_000):
        meter.add(step(number, split={"data": 0.1, "forward": 0.4}))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 20_000 * 20
    assert meter.window()["data_ms"] == pytest.approx(100)


MATMUL, REDUCE = "nvjet_sm90_tst_128x128", "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL"
COPY = "Memcpy HtoD (Pinned -> Device)"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (REDUCE, "communication"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        (COPY, "copy"),
        ("Memcpy DtoD (Device -> Device)", "compute"),
        ("void at::native::vectorized_elementwise_kernel<4>", "compute"),
        (MATMUL, "compute"),
    ],
)
def test_kinds_of_kernels(name, kind):
    assert kind_of(name) == kind


def test_hidden_communication_is_not_exposed():
    # 0-100 compute, 50-150 communication, 150-200 nothing, 200-300 compute with a copy beside it, 300-400 a copy alone.
    spans = [
        Span(REDUCE, 50, 150),
        Span(MATMUL, 0, 60),
        Span(MATMUL, 40, 100),
        Span(MATMUL, 200, 300),
        Span(COPY, 220, 400),
    ]
    found = inspect_spans(spans, steps=2)
    assert found.seconds == pytest.approx(200e-6)
    assert found.idle == pytest.approx(50 / 400)
    assert found.exposed_communication == pytest.approx(50 / 400)
    assert found.communication == pytest.approx(100 / 400)
    assert found.exposed_copies == pytest.approx(100 / 400)


def test_the_time_looked_at_may_be_longer_than_what_was_seen():
    assert inspect_spans([Span(MATMUL, 0, 100)], steps=1, seconds=400e-6).idle == pytest.approx(0.75)


def test_without_spans_nothing_is_known():
    found = inspect_spans([], steps=2, waits=[("a.py:3 (step)", 2)])
    assert (found.idle, found.exposed_communication, found.waits) == (None, None, (("a.py:3 (step)", 2),))
