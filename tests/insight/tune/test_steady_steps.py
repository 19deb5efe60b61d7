import random

import pytest

from lightning_ups.insight.tune import steady


def times(warmup, count, *, noise=0.01, seed=0):
    draw = random.Random(seed)
    return [*warmup, *(draw.gauss(1, noise) for _ in range(count))]


def test_slow_first_steps_are_left_out():
    found = steady(times([30.0, 4.0, 3.0], 40))
    assert found.warmup == 3
    assert found.mean == pytest.approx(1, abs=0.01)
    assert found.has_settled
    assert found.error < 0.01


def test_times_without_warmup_are_kept():
    assert steady(times([], 40)).warmup <= 5


def test_rare_slow_steps_count_for_the_mean_but_not_for_the_median():
    values = times([], 40)
    values[9::10] = [3.0] * 4
    found = steady(values)
    assert found.mean == pytest.approx(1.2, abs=0.07)
    assert found.quartiles[1] == pytest.approx(1, abs=0.01)


def test_falling_times_have_not_settled():
    assert not steady([20.0 - i for i in range(20)]).has_settled


def test_few_steps_have_not_settled():
    assert not steady(times([], 5)).has_settled
    one = steady([2.0])
    assert (one.mean, one.quartiles, one.error) == (2.0, (2.0, 2.0, 2.0), float("inf"))


def test_no_step_is_an_error():
    with pytest.raises(ValueError, match="at least one step"):
        steady([])
