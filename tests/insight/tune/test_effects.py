import random

import pytest

from lightning_ups.insight.tune import Result, Rounds, loss_difference, loss_fault


def rounds(drift, noise=0.002, error=0.001, seed=0, **speeds):
    draw = random.Random(seed)
    return Rounds(
        {
            name: [Result(samples_per_s=speed * each * draw.gauss(1, noise), error=error) for each in drift]
            for name, speed in speeds.items()
        }
    )


def test_drift_of_the_machine_moves_no_gain():
    found = rounds([1.0, 0.7, 1.4], a=100, b=110, c=100)
    gain = found.gain("b", "a")
    assert gain.value == pytest.approx(0.10, abs=0.01)
    assert gain.low < 0.1 < gain.high
    assert gain.high - gain.low < 0.03
    assert gain.verdict == "worth it"
    assert found.gain("a", "b").verdict == "harmful"
    assert found.gain("c", "a").verdict == "neutral"


def test_identical_configurations_are_neutral():
    verdicts = [rounds([1, 1, 1], noise=0.02, seed=seed, a=100, b=100, c=100).gain("b", "a") for seed in range(100)]
    assert sum(each.verdict != "neutral" for each in verdicts) <= 8


def test_the_interval_contains_the_truth():
    gains = [rounds([1, 1.2, 0.9], noise=0.03, seed=seed, a=100, b=105, c=90).gain("b", "a") for seed in range(200)]
    assert 180 <= sum(each.low < 0.05 < each.high for each in gains) <= 199


def test_one_round_cannot_tell():
    gain = rounds([1.0], noise=0.03, error=0.001, a=100, b=150).gain("b", "a")
    assert gain.verdict == "one round cannot tell"
    assert not gain.is_known
    assert not gain.low > 0
    assert gain.as_dict()["low"] is None
    assert str(gain).endswith("% [not known]")


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("error", [0.002, 0.01, 0.03])
def test_equal_runs_are_seldom_called_different(count, error):
    found = [
        rounds([1.0] * count, noise=0.03, error=error, seed=seed, a=100, b=100).gain("b", "a") for seed in range(400)
    ]
    assert sum(each.verdict in ("worth it", "harmful") for each in found) <= 30  # of 20 that are expected


def test_rounds_that_one_lacks_are_left_out():
    both = {"a": [100, 50, 100], "b": [110, 55]}  # the machine was slow in the second round
    found = Rounds({name: [Result(samples_per_s=rate) for rate in rates] for name, rates in both.items()})
    assert found.gain("b", "a").value == pytest.approx(0.1)


def test_a_certain_but_tiny_gain_is_neutral():
    assert rounds([1, 1, 1], noise=1e-5, error=1e-5, a=1000, b=1005).gain("b", "a").verdict == "neutral"


def test_losses_are_compared_over_the_steps_that_both_have():
    one, other = Result(losses=[1.1, 2.2, 9.0]), Result(losses=[1.0, 2.0])
    assert loss_difference(one, other) == pytest.approx(0.1)
    assert loss_difference(one, Result()) is None


FALLING = [2.0, 1.9, 1.85, 1.78, 1.7, 1.66, 1.6, 1.55]
NAN = float("nan")


@pytest.mark.parametrize(
    ("losses", "reference", "part"),
    [
        (FALLING, FALLING, None),
        ([1.03 * loss for loss in FALLING], FALLING, None),
        ([1.08 * loss for loss in FALLING], FALLING, "8 steps differs by +8.0%"),
        ([2.0] * 8, FALLING, "in each step"),
        ([2.0, 1.99, 2.01, 2.0, 1.99, 2.0, 2.0, 2.01], FALLING, "differs by +1"),  # nothing is learned
        ([*FALLING[:5], 5.0, 20.0, 100.0], FALLING, "differs"),
        ([*FALLING[:7], NAN], FALLING, "the loss of step 8 is nan"),
        ([], FALLING, "no loss was recorded"),
        (FALLING[:2], FALLING, None),
        ([2.5], FALLING, "1 steps differs"),
        (FALLING, [2.0, 1.9, NAN, NAN], None),  # of the reference only the steps before count
        ([2.0, NAN], [2.0, NAN], None),
        ([9.0], [NAN], None),
        (FALLING, [], None),
        ([0.02, -0.01, 0.03, -0.02], [0.02, -0.0102, 0.0301, -0.0199], None),  # of both signs
        ([0.0, 0.0, 0.0], [0.0, 0.0, 0.0], None),
        ([0.0, 0.0, 0.5], [0.0, 0.0, 0.0], "differs"),
    ],
)
def test_losses_that_are_not_those_of_the_reference_are_a_fault(losses, reference, part):
    found = loss_fault(Result(losses=losses), Result(losses=reference))
    assert (found is None) if part is None else (part in (found or ""))


def test_noise_as_of_dropout_is_seldom_a_fault():
    draw = random.Random(0)
    found = [
        loss_fault(*(Result(losses=[loss * draw.gauss(1, 0.1) for loss in FALLING]) for _ in range(2)))
        for _ in range(300)
    ]
    assert sum(each is not None for each in found) <= 45
    twice = [
        loss_fault(*(Result(losses=[scale * loss * draw.gauss(1, 0.1) for loss in FALLING]) for scale in (1.5, 1)))
        for _ in range(300)
    ]
    assert sum(each is not None for each in twice) >= 290
