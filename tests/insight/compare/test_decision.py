import numpy as np
import pytest

from lightning_ups.insight.compare.decision import CANNOT_TELL, FAIL, PASS, Band, gate, percent
from lightning_ups.insight.compare.differences import Side
from tests.insight.compare.synthetic import losses, run, step_times


def decided(base, new, *, slower=None, loss=None, metric=None):
    base, new = (each if isinstance(each, list) else [each] for each in (base, new))
    return gate(Side("base", base), Side("new", new), slower=slower, loss=loss, metric=metric)


def steady(seed, factor=1.0):
    return factor * step_times(seed, spread=0.01, drift=0.001)


def test_equal_runs_pass_and_slower_ones_fail():
    for index in range(10):
        base, new = steady(2 * index), steady(2 * index + 1)
        assert decided(run(times=base), run(times=new)).verdict == PASS
        slow = decided(run(times=base), run(times=1.05 * new))
        assert slow.verdict == FAIL
        assert "% slower (99 % interval" in slow.reason
        assert "at most 2.0 % is allowed" in slow.reason
        assert decided(run(times=base), run(times=1.05 * new), slower=0.1).verdict == PASS


def test_noise_that_could_hide_the_limit_cannot_pass():
    base, new = (step_times(seed, count=60, spread=0.2) for seed in (0, 1))
    assert decided(run(times=base), run(times=new)).verdict == CANNOT_TELL
    few = decided(run(times=base[:5]), run(times=new[:5]))
    assert few.verdict == CANNOT_TELL
    assert "too few for an interval" in few.reason


def test_stalls_fail():
    base, new = (0.1 + 0.001 * np.random.default_rng(seed).normal(size=600) for seed in (0, 1))
    new[::25] += 0.2
    decision = decided(run(times=base), run(times=new))
    assert decision.verdict == FAIL
    assert decision.reason.startswith("the mean step is 7.8 % slower")


def test_a_band_is_one_sided_and_absolute_or_relative():
    base, new = run(loss=losses(0)), run(loss=losses(1, end=2.2))
    assert decided(base, new, loss=Band(0.05)).verdict == FAIL
    assert decided(base, new, loss=Band(0.3)).verdict == PASS
    assert decided(base, new, loss=Band(0.15, relative=True)).verdict == PASS
    assert decided(base, new, loss=Band(0.05, relative=True)).verdict == FAIL
    assert decided(new, base, loss=Band(0.0)).verdict == PASS  # better


def test_without_a_band_the_noise_is_the_band():
    assert decided(run(loss=losses(0)), run(loss=losses(1))).verdict == PASS
    assert decided(run(loss=losses(0)), run(loss=losses(1, end=2.2))).verdict == FAIL
    seeds = [run(loss=losses(seed, end=2 + 0.1 * (seed % 3))) for seed in range(6)]
    assert decided(seeds[:3], seeds[3:]).verdict == PASS
    worse = [run(loss=losses(seed, end=3 + 0.1 * (seed % 3))) for seed in range(3)]
    decision = decided(seeds[:3], worse)
    assert decision.verdict == FAIL
    assert "the band of its seeds" in decision.reason


def test_few_values_show_no_noise():
    base, new = run(val_loss=[3.0, 2.0, 1.0]), run(val_loss=[3.0, 2.0, 1.1])
    assert decided(base, new).verdict == CANNOT_TELL
    assert decided(base, new, loss=Band(0.2)).verdict == PASS
    for index, each in enumerate((base, new)):
        each.series["train_loss"] = run(loss=losses(index)).series["loss"]
    assert decided(base, new).reason.startswith("train_loss is")
    assert decided(base, new, loss=Band(0.2)).reason.startswith("val_loss is")


def test_an_equal_or_lower_loss_passes_however_few_values_there_are():
    for values in ([0.5], [3.0, 2.0, 1.0], [0.9] * 40):
        assert decided(run(val_loss=values), run(val_loss=values)).verdict == PASS
    assert decided(run(val_loss=[0.5]), run(val_loss=[0.4])).verdict == PASS


def test_not_finite_fails_whatever_the_band():
    values = losses(0)
    values[-1] = np.nan
    assert decided(run(loss=losses(0)), run(loss=values), loss=Band(100.0)).verdict == FAIL


def test_the_validation_loss_comes_first_and_any_may_be_named():
    one = run(val_loss=losses(0), train_loss=losses(1), error=losses(2))
    other = run(val_loss=losses(3), train_loss=losses(4), error=losses(5, end=3.0))
    assert decided(one, other).reason.startswith("val_loss is ")
    assert decided(one, other, metric="error").verdict == FAIL


def test_all_reasons_of_a_failure_are_given():
    base, new = run(times=steady(0), loss=losses(0)), run(times=steady(1, 1.1), loss=losses(1, end=3.0))
    assert ", and loss is 3" in decided(base, new).reason
    only_slow = run(times=steady(1, 1.1), loss=losses(1))
    assert "loss" not in decided(base, only_slow).reason


def test_what_is_asked_for_must_be_there():
    with pytest.raises(ValueError, match="--slower needs step times, which run does not have"):
        decided(run(loss=losses(0)), run(loss=losses(1)), slower=0.02)
    with pytest.raises(ValueError, match=r"--metric los is not in all runs\. They have loss"):
        decided(run(loss=losses(0)), run(loss=losses(1)), metric="los")
    with pytest.raises(ValueError, match="--loss finds no loss"):
        decided(run(times=steady(0)), run(times=steady(1)), loss=Band(1.0))
    with pytest.raises(ValueError, match="share neither step times nor a loss"):
        decided(run(accuracy=losses(0)), run(loss=losses(1)))


def test_batches_of_different_sizes_are_refused():
    base, new = (run(times=steady(0), manifest={"batch": {"size": size}}) for size in (8, 16))
    with pytest.raises(ValueError, match="batches have 16 and 8 rows"):
        decided(base, new)


def test_percent():
    assert percent(0.0312) == "3.1 %"
    assert percent(0.0312, sign=True) == "+3.1 %"
    assert percent(-0.5) == "-50 %"
