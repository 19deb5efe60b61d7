import pytest

from lightning_ups.kernels.attention.regions import find_regions


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
