import pytest

from lightning_ups.insight.throughput.inspection import Span, inspect_spans, kind_of

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
