import pytest

from lightning_ups.kernels.attention.expected import Expected, Point, point_of
from lightning_ups.kernels.attention.table import Row


def row(seq, times, *, dim=128, heads=32, kv_heads=8, batch=None, causal=True, forward=None):
    return Row(dim, heads, kv_heads, seq, batch or 32768 // seq, causal, forward or {}, times)


def point(seq, *, dim=128, kv_heads=8, causal=True, batch=None):
    return point_of(row(seq, {}, dim=dim, kv_heads=kv_heads, causal=causal, batch=batch))


def best(rows, where, *, trains=True):
    times = Expected(rows, trains=trains).milliseconds(where)
    return min(times, key=times.__getitem__)


CROSSING = (
    row(1024, {"cudnn": 1.0, "fa4": 2.0}),
    row(4096, {"cudnn": 4.0, "fa4": 4.8}),
    row(16384, {"cudnn": 19.0, "fa4": 16.0}, forward={"cudnn": 1.0, "fa4": 3.0}),
)


def test_a_measured_shape_takes_what_was_measured():
    expected = Expected(CROSSING, trains=True)
    for measured in CROSSING:
        assert expected.milliseconds(point_of(measured)) == pytest.approx(measured.training, rel=1e-6)


@pytest.mark.parametrize(("seq", "wanted"), [(512, "cudnn"), (1536, "cudnn"), (14000, "fa4"), (65536, "fa4")])
def test_between_and_beyond_the_measured_lengths(seq, wanted):
    assert best(CROSSING, point(seq, batch=2)) == wanted


def test_time_grows_with_batch_as_work_does():
    few, many = (Expected(CROSSING, trains=True).milliseconds(point(4096, batch=batch)) for batch in (16, 32))
    assert many["cudnn"] == pytest.approx(2 * few["cudnn"], rel=0.15)


def test_forward_alone_has_times_of_its_own():
    assert best(CROSSING, point(16384), trains=False) == "cudnn"
    assert best(CROSSING, point(16384)) == "fa4"


def test_a_backend_that_waits_for_its_host_takes_as_long_for_less_work():
    rows = [
        row(1024, {"cudnn": work / 10, "fa4": max(work / 20, 1.2) + noise}, batch=work)
        for work, noise in ((1, 0.1), (2, -0.1), (4, 0.2), (8, 0.0), (64, 0.0), (128, 0.0))
    ]
    expected = Expected(rows, trains=True)
    assert expected.host["fa4"] == pytest.approx(1.3, abs=0.1)
    assert expected.host["cudnn"] == 0
    assert expected.milliseconds(point(512, batch=1))["fa4"] == expected.host["fa4"]
    # And the speed is that of the others, not one that is mixed with the waiting.
    assert expected.milliseconds(point(1024, batch=100))["fa4"] == pytest.approx(5.0, rel=0.05)
    assert best(rows, point(1024, batch=6)) == "cudnn"
    assert best(rows, point(1024, batch=40)) == "fa4"


def test_a_host_that_was_measured_is_the_least_that_a_call_takes():
    rows = [row(1024, {"cudnn": work / 10, "fa4": work / 20}, batch=work) for work in (1, 2, 4, 8, 64, 128)]
    expected = Expected(rows, trains=True, host={"cudnn": 0.2, "fa4": 0.5})
    assert expected.host == {"cudnn": 0.2, "fa4": 0.5}
    for batch, wanted in ((1, (0.2, 0.5)), (4, (0.4, 0.5)), (64, (6.4, 3.2)), (20, (2.0, 1.0))):
        found = expected.milliseconds(point(1024, batch=batch))
        assert (found["cudnn"], found["fa4"]) == pytest.approx(wanted, rel=0.05)
    assert best(rows, point(1024, batch=1)) == "fa4", "by the device alone"


def test_the_nearest_width_decides():
    rows = (row(4096, {"cudnn": 1.0, "fa4": 2.0}, dim=64), row(4096, {"cudnn": 2.0, "fa4": 1.0}, dim=128))
    assert best(rows, point(4096, dim=72)) == "cudnn"
    assert best(rows, point(4096, dim=120)) == "fa4"
    assert best(rows, point(6144, dim=64, batch=8)) == "cudnn"


def test_grouping_decides_only_where_all_else_is_equal():
    rows = (row(4096, {"cudnn": 2.0, "fa4": 1.0}, kv_heads=32), row(4096, {"cudnn": 1.0, "fa4": 2.0}, kv_heads=8))
    assert best(rows, point(4096, kv_heads=32)) == "fa4"
    assert best(rows, point(4096, kv_heads=4)) == "cudnn"
    length = (row(1024, {"cudnn": 2.0, "fa4": 1.0}, kv_heads=32), row(4096, {"cudnn": 1.0, "fa4": 2.0}, kv_heads=8))
    assert best(length, point(4096, kv_heads=32)) == "cudnn"


def test_full_attention_has_times_of_its_own():
    rows = (row(4096, {"cudnn": 2.0, "fa4": 1.0}), row(4096, {"cudnn": 1.0, "fa4": 2.0}, causal=False))
    assert best(rows, point(4096)) == "fa4"
    assert best(rows, point(4096, causal=False)) == "cudnn"


def test_a_backend_that_failed_nearby_has_no_say_from_afar():
    rows = (row(4096, {"cudnn": 1.0}, dim=256), row(4096, {"cudnn": 2.0, "fa4": 1.0}, dim=64))
    assert set(Expected(rows, trains=True).milliseconds(point(4096, dim=256))) == {"cudnn"}


def test_a_line_is_the_times_along_the_pairs():
    expected = Expected(CROSSING, trains=True)
    here = Point(128, 4.0, True, 2000, 1e9)
    assert expected.line(here, among=["fa4"])(3e9) == {
        "fa4": pytest.approx(expected.milliseconds(here._replace(pairs=3e9))["fa4"])
    }
