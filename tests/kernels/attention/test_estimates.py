import pytest

from lightning_ups.kernels.attention.estimates import Expected, Row, find_regions, parse_table, point_of, tables


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
        assert expected.milliseconds(point_of(measured)) == pytest.approx(measured.training, rel=1e-4)


@pytest.mark.parametrize(("seq", "wanted"), [(512, "cudnn"), (1536, "cudnn"), (14000, "fa4"), (65536, "fa4")])
def test_between_and_beyond_the_measured_lengths(seq, wanted):
    assert best(CROSSING, point(seq, batch=2)) == wanted


def test_time_grows_with_batch_as_work_does():
    few, many = (Expected(CROSSING, trains=True).milliseconds(point(4096, batch=batch)) for batch in (16, 32))
    assert many["cudnn"] == pytest.approx(2 * few["cudnn"], rel=0.15)


def test_a_host_that_was_measured_is_the_least_that_a_call_takes():
    rows = [row(1024, {"cudnn": work / 10, "fa4": work / 20}, batch=work) for work in (1, 2, 4, 8, 64, 128)]
    expected = Expected(rows, trains=True, host={"cudnn": 0.2, "fa4": 0.5})
    assert expected.host == {"cudnn": 0.2, "fa4": 0.5}
    for batch, wanted in ((1, (0.2, 0.5)), (4, (0.4, 0.5)), (64, (6.4, 3.2)), (20, (2.0, 1.0))):
        found = expected.milliseconds(point(1024, batch=batch))
        assert (found["cudnn"], found["fa4"]) == pytest.approx(wanted, rel=0.05)
    assert best(rows, point(1024, batch=1)) == "fa4", "by the device alone"


@pytest.mark.parametrize(
    ("other", "near_it", "near_causal_128"),
    [
        ({"dim": 64}, ({"dim": 72}, {"dim": 64, "batch": 4}), {"dim": 120}),
        ({"kv_heads": 32}, ({"kv_heads": 32},), {"kv_heads": 4}),
        ({"causal": False}, ({"causal": False},), {}),
    ],
    ids=["width", "grouping", "causal"],
)
def test_the_nearest_shape_decides(other, near_it, near_causal_128):
    rows = (row(4096, {"cudnn": 1.0, "fa4": 2.0}, **other), row(4096, {"cudnn": 2.0, "fa4": 1.0}))
    assert {best(rows, point(4096, **where)) for where in near_it} == {"cudnn"}
    assert best(rows, point(4096, **near_causal_128)) == "fa4"


def test_a_backend_that_failed_nearby_has_no_say_from_afar():
    rows = (row(4096, {"cudnn": 1.0}, dim=256), row(4096, {"cudnn": 2.0, "fa4": 1.0}, dim=64))
    assert set(Expected(rows, trains=True).milliseconds(point(4096, dim=256))) == {"cudnn"}


def test_where_one_is_always_the_fastest_nothing_is_compared():
    regions = find_regions(lambda length: lambda pairs: {"cudnn": pairs, "fa4": pairs * 1.01})
    assert (regions.low, regions.high) == (0, 0)
    assert [one.backends for one in regions.ranges] == [("cudnn",)]


def test_a_border_between_pairs_is_exact_for_all_lengths():
    regions = find_regions(lambda length: lambda pairs: {"cudnn": pairs, "fa4": max(5e8, pairs / 2)})
    assert len(regions.ranges) == 1, "it is the same for all lengths, so none is compared"
    assert regions.low == regions.high == pytest.approx(5e8, rel=0.01)
    assert regions.at(length=1000, pairs=4.9e8) == "cudnn"
    assert regions.at(length=30000, pairs=5.1e8) == "fa4"


def test_a_border_between_lengths_is_found_to_a_cell():
    regions = find_regions(lambda length: lambda pairs: {"cudnn": length, "fa4": 3000.0})
    assert len(regions.ranges) == 2
    assert regions.ranges[1].first == pytest.approx(3000, rel=0.13)
    assert regions.at(length=100, pairs=1e9) == "cudnn"
    assert regions.at(length=10000, pairs=1e9) == "fa4"
    assert regions.low == regions.ranges[1].first ** 2, "a row of the longer ones has more pairs"
    assert regions.high > 1e18


def test_ranges_that_few_pairs_cannot_reach_do_not_count_for_them():
    def line(length):
        return lambda pairs: {"cudnn": pairs, "fa4": max(5e8, pairs / 2), "flash": 0 if length > 30000 else 1e30}

    regions = find_regions(line)
    assert regions.ranges[-1].backends == ("flash",)
    assert regions.low == pytest.approx(5e8, rel=0.01)
    assert regions.at(length=1000, pairs=4e8) == "cudnn"


def test_lengths_share_a_range_while_what_is_chosen_is_near_the_fastest():
    """A border that leans is followed by ranges, and in each the choice costs little."""

    def line(length):
        return lambda pairs: {"cudnn": pairs, "fa4": max(4e8 * (length / 1024) ** 0.05, pairs / 2)}

    regions = find_regions(line)
    assert 3 < len(regions.ranges) < 14
    for length in (100, 700, 1024, 3000, 9000):
        for pairs in (1e8, 3.6e8, 4e8, 4.2e8, 4.6e8, 1e9):
            times = line(length)(pairs)
            assert times[regions.at(length=length, pairs=pairs)] <= 1.05 * min(times.values())


def test_a_backend_that_is_not_measured_everywhere_is_chosen_only_where_it_is():
    def line(length):
        return lambda pairs: {"cudnn": 1.0} if length > 1000 else {"cudnn": 1.0, "fa4": 0.5}

    regions = find_regions(line)
    assert regions.at(length=500, pairs=1e9) == "fa4"
    assert regions.at(length=2000, pairs=1e9) == "cudnn"


def test_a_file_says_what_was_measured():
    row = {"head_dim": 64, "heads": 4, "kv_heads": 2, "seq": 8, "batch": 1, "causal": True}
    times = {"forward": {"math": 1.0}, "training": {"math": 3.0}}
    content = {"device": "Test GPU", "capability": [9, 0], "versions": {"torch": "2"}, "date": "2026-11-22"}
    table = parse_table({**content, "rows": [{**row, **times}]})
    assert (table.device, table.capability, table.date) == ("Test GPU", (9, 0), "2026-11-22")
    assert table.host == {}
    host = {"training": {"math": 0.1}, "forward": {"math": 0.02}}
    assert parse_table({**content, "host": host, "rows": []}).host == host
    assert table.rows == (Row(64, 4, 2, 8, 1, True, {"math": 1.0}, {"math": 3.0}),)


def test_the_package_has_one_of_each_width_of_heads_for_hopper():
    hopper = [table for table in tables() if table.capability == (9, 0)]
    assert {row.head_dim for table in hopper for row in table.rows} == {32, 64, 128, 256}
    assert all({"cudnn", "flash", "fa4"} <= {*row.training} for table in hopper for row in table.rows)
