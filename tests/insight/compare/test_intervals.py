import math

import numpy as np
import pytest

from lightning_ups.insight.compare.differences import FLOOR
from lightning_ups.insight.compare.intervals import Estimate, groups, paired
from tests.insight.compare.synthetic import NOISES, step_times


def test_an_estimate_without_an_interval_excludes_nothing():
    assert not Estimate(5.0).excludes(0)
    assert Estimate(5.0, 4.0, 6.0).excludes(0)
    assert Estimate(-5.0, -6.0, -4.0).excludes(0)
    assert not Estimate(0.5, -1.0, 2.0).excludes(0)


def test_few_points_have_no_interval():
    found = paired(np.zeros(7), np.ones(7))
    assert found.value == 1
    assert math.isnan(found.low)
    assert paired(np.zeros(8), np.ones(8)).low == 1


def test_correlated_points_make_the_interval_wider():
    def width(correlation):
        options = {"correlation": correlation, "outliers": 0, "drift": 0}
        found = [paired(*(np.log(step_times(2 * i + j, **options)) for j in (0, 1))) for i in range(10)]
        return np.median([each.high - each.low for each in found])

    assert width(0.95) > 2.5 * width(0.0)


@pytest.mark.parametrize("count", [100, 600])
def test_the_interval_contains_the_truth_about_as_often_as_it_says(count):
    pairs = [[np.log(step_times(2 * i + j, count=count)[count // 10 :]) for j in (0, 1)] for i in range(150)]
    missed = sum(paired(base, new).excludes(0) for base, new in pairs)
    assert missed <= 6  # of 150; one in a hundred is meant, and drift is not quite noise


@pytest.mark.parametrize(
    ("noise", "most_alarms", "fewest_found"),  # of 200
    [
        ("white", 6, 190),
        ("correlated", 6, 80),
        ("strongly correlated", 8, 10),
        ("heavy tails", 6, 190),
        ("trend", 4, 170),
        ("validation", 6, 190),
        ("bursts", 6, 0),
        ("two modes", 6, 190),
        ("batches", 6, 190),
        ("walk", 60, 180),  # where the speed of a run wanders as far, equal runs do differ
    ],
)
def test_false_alarms_are_rare_and_three_percent_are_found(noise, most_alarms, fewest_found):
    alarms, found = rates(noise, count=600)
    assert alarms <= most_alarms
    assert found >= fewest_found


@pytest.mark.parametrize(
    ("noise", "most_alarms"), [("correlated", 8), ("strongly correlated", 20), ("bursts", 18), ("heavy tails", 6)]
)
def test_false_alarms_of_short_runs(noise, most_alarms):
    assert rates(noise, count=100)[0] <= most_alarms


def rates(noise, *, count):
    """Return how many of 200 pairs of equal runs are called different, and of 200 with 3 % slower."""
    alarms = found = 0
    for index in range(200):
        rng = np.random.default_rng([len(noise), index])
        base, new = (np.log(NOISES[noise](rng, count)[count // 10 :]) for _ in range(2))
        estimate, slower = paired(base, new), paired(base, new + math.log(1.03))
        alarms += estimate.excludes(0) and abs(estimate.value) >= FLOOR
        found += slower.low > 0 and slower.value >= FLOOR
    return alarms, found


def test_rare_outliers_do_not_move_the_typical_value_but_the_mean():
    rng = np.random.default_rng(0)
    base, new = 1 + 0.01 * rng.normal(size=(2, 400))
    new[::20] += 2.0  # one step in twenty takes three times as long
    typical, mean = paired(base, new), paired(base, new, typical=False)
    assert abs(typical.value) < 0.005
    assert not typical.excludes(0)
    assert mean.value == pytest.approx(0.1, abs=0.01)
    assert mean.low > 0.05


def test_groups_of_runs_use_the_spread_between_runs():
    found = groups([1.0, 1.1, 0.9], [2.0, 2.1, 1.9])
    assert found.value == pytest.approx(1.0)
    assert found.high - 1.0 == pytest.approx(4.604 * 0.1 * math.sqrt(2 / 3), rel=1e-3)  # Student's t, 4 degrees
    assert not groups([1.0, 2.0], [1.5, 2.5]).excludes(0)
    assert math.isnan(groups([1.0], [2.0]).low)
