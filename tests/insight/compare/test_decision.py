import numpy as np
import pytest

from lightning_ups.insight.compare import decision
from lightning_ups.insight.compare.decision import CANNOT_TELL, FAIL, PASS, Band, gate, interval, percent
from lightning_ups.insight.compare.differences import Side
from lightning_ups.insight.compare.intervals import Estimate
from tests.insight.compare.synthetic import losses, run, series, step_times


def decided(base, new, *, slower=None, loss=None, metric=None, higher=None):
    base, new = (each if isinstance(each, list) else [each] for each in (base, new))
    return gate(Side("base", base), Side("new", new), slower=slower, loss=loss, metric=metric, higher=higher)


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
    assert "4 values, too few for an interval" in few.reason
    assert "1 value, too few for an interval" in decided(run(times=base[:1]), run(times=new[:1])).reason


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


def test_without_a_band_two_percent_are_allowed():
    assert decided(run(loss=losses(0)), run(loss=losses(1, noise=0.02))).verdict == PASS
    assert decided(run(loss=losses(0)), run(loss=losses(1, end=2.2))).verdict == FAIL
    decision = decided(run(loss=losses(0)), run(loss=losses(1, end=2.05)))
    assert decision.verdict == CANNOT_TELL
    assert "(2.0 %) worse is allowed" in decision.reason


def seeds(end, *, spread=0.004, first=0):
    return [run(loss=losses(first + seed, end=end + spread * (seed % 3 - 1), noise=0.01)) for seed in range(3)]


def test_several_runs_are_decided_by_the_interval_of_their_difference():
    assert decided(seeds(2.0), seeds(2.0, first=3)).verdict == PASS
    assert decided(seeds(2.0), seeds(2.7, first=3)).verdict == FAIL
    assert decided(seeds(2.0), seeds(1.7, first=3)).verdict == PASS


def test_the_more_seeds_differ_the_less_passes():
    for end in (2.0, 2.05):
        decision = decided(seeds(2.0, spread=0.5), seeds(end, spread=0.5, first=3))
        assert decision.verdict == CANNOT_TELL
        assert "allow more by --loss" in decision.reason
    assert decided(seeds(2.0, spread=0.5), seeds(2.7, spread=0.5, first=3), loss=Band(0.1)).verdict == CANNOT_TELL
    assert decided(seeds(2.0, spread=0.5), seeds(2.7, spread=0.5, first=3), loss=Band(5.0)).verdict == PASS


def test_cannot_tell_names_what_would_help():
    loss = decided(run(loss=losses(0)), run(loss=losses(1)), loss=Band(0.02))
    assert loss.verdict == CANNOT_TELL
    assert "about 7 times as many logged values would tell" in loss.reason
    speed = decided(*(run(times=factor * steady(seed)) for seed, factor in enumerate((1, 1.0187))))
    assert speed.verdict == CANNOT_TELL
    assert "times as many steps would tell" in speed.reason
    few = decided(seeds(2.0, spread=0.02), seeds(2.0, spread=0.02, first=3))
    assert few.verdict == CANNOT_TELL
    assert "runs per side would tell" in few.reason


@pytest.mark.parametrize("metric", ["val_acc", "score"])
def test_a_higher_accuracy_passes_and_a_lower_one_fails(metric):
    values = [np.full(50, level) + 0.001 * np.random.default_rng(0).normal(size=50) for level in (0.9, 0.1)]
    good, bad = (run(settings={"a/monitor": "score", "a/mode": "max"}, **{metric: each}) for each in values)
    assert decided(good, bad, metric=metric).verdict == FAIL
    assert decided(bad, good, metric=metric).verdict == PASS
    assert decided(good, bad, metric=metric, higher=False).verdict == PASS
    assert decided(good, bad, metric=metric, loss=Band(0.9)).verdict == PASS
    assert decided(good, bad, metric=metric, loss=Band(0.5, relative=True)).verdict == FAIL


def test_losses_that_still_fall_fail_or_the_reason_is_that_they_fall():
    steps = np.arange(30.0)
    slow, fast = (run(train_loss=np.exp(-steps / each)) for each in (25, 5))
    assert decided(fast, slow).verdict == FAIL
    assert decided(slow, fast).verdict == PASS
    rough = run(train_loss=np.exp(-steps / 25 + 0.05 * np.sin(steps)))
    decision = decided(slow, rough)
    assert decision.verdict == CANNOT_TELL
    assert (
        "both still fall over these 10 values, base from 0.415 to 0.34 and new from 0.417 to 0.345" in decision.reason
    )
    assert decision.reason.endswith("so train longer")


def test_an_interval_without_use_is_not_printed():
    base, *new = (run(times=factor * steady(seed)) for seed, factor in enumerate((1.0, 0.9, 1.2)))
    decision = decided([base], new)
    assert decision.verdict == CANNOT_TELL
    assert "(99 % interval too wide to tell)" in decision.reason
    assert decision.reason.endswith("give at least 3 runs per side")


def test_no_interval_reaches_below_minus_100_percent():
    assert interval(Estimate(-0.05, -3.31, 3.21), relative=True) == "too wide to tell"
    assert interval(Estimate(-0.6, -1.1, -0.1), relative=True) == "-100 % to -10 %"
    assert interval(Estimate(-0.5, -0.9, 0.5), relative=True) == "-90 % to +50 %"
    assert interval(Estimate(-0.05, -3.31, 3.21), relative=False) == "-3.31 to +3.21"


def test_an_unknown_direction_is_not_guessed():
    sides = run(score=losses(0)), run(score=losses(1))
    with pytest.raises(ValueError, match="--higher-is-better"):
        decided(*sides, metric="score")
    assert decided(*sides, metric="score", higher=True, loss=Band(1.0)).verdict == PASS


def test_a_rate_is_compared_by_its_ratio_whatever_the_band():
    fast, slow = (run(**{"throughput/tokens_per_s": level + np.arange(50) % 2}) for level in (1000, 900))
    for band in (Band(0.05, relative=True), Band(50.0)):
        assert decided(fast, slow, metric="throughput/tokens_per_s", loss=band).verdict == FAIL
        assert decided(slow, fast, metric="throughput/tokens_per_s", loss=band).verdict == PASS
    assert decided(fast, slow, metric="throughput/tokens_per_s", loss=Band(150.0)).verdict == PASS


def test_a_run_that_ended_early_does_not_pass():
    base, new = losses(0), losses(1)
    decision = decided(run(loss=base), run(loss=new[:300]), loss=Band(1.0))
    assert decision.verdict == CANNOT_TELL
    assert "ended at step 299" in decision.reason
    assert "399" in decision.reason
    assert decided(run(loss=base[:300]), run(loss=new), loss=Band(1.0)).verdict == PASS
    assert decided(run(times=steady(0)), run(times=steady(1)[:500])).verdict == CANNOT_TELL
    assert decided(run(times=steady(0)), run(times=1.1 * steady(1)[:500])).verdict == FAIL  # slow in any case
    assert decided(run(loss=base), [run(loss=new), run(loss=new[:200])], loss=Band(1.0)).verdict == CANNOT_TELL
    assert decided(run(loss=base), run(loss=new[:-1]), loss=Band(1.0)).verdict == PASS  # a last value may be missing
    every = run(loss=series(base[::10], every=10)), run(loss=series(new[::50], every=50))
    assert decided(*every, loss=Band(1.0)).verdict == PASS  # it is only logged less often


def test_a_run_that_still_runs_or_was_killed_does_not_pass():
    new = run(loss=losses(1), manifest={"run": {"status": "running"}})
    decision = decided(run(loss=losses(0)), new, loss=Band(1.0))
    assert decision.verdict == CANNOT_TELL
    assert "running" in decision.reason


def test_a_run_that_failed_does_not_pass():
    manifest = {"run": {"status": "failed", "error": "OutOfMemoryError: 3 GiB"}}
    decision = decided(run(loss=losses(0)), run(loss=losses(1), manifest=manifest), loss=Band(1.0))
    assert decision.verdict == FAIL
    assert "OutOfMemoryError: 3 GiB" in decision.reason


def test_a_value_that_is_not_finite_is_blamed_on_its_side():
    broken = losses(0, count=450)
    broken[430:] = np.nan
    for base, new, verdict, name in (
        (losses(1), broken, FAIL, "new"),  # after the last step of base
        (broken, losses(1, count=450), CANNOT_TELL, "base"),
        (broken, broken, FAIL, "new"),
    ):
        decision = decided(run(loss=base), run(loss=new), loss=Band(1.0))
        assert decision.verdict == verdict
        assert f"loss of {name}" in decision.reason
        assert "not finite at step 430" in decision.reason


def test_step_times_of_zero_are_no_times():
    base, new = steady(0), steady(1, 1.1)
    new[100:110] = 0
    assert decided(run(times=base), run(times=new)).verdict == FAIL
    assert decided(run(times=new), run(times=base)).verdict == PASS
    coarse = np.where(np.arange(600) % 3, 0.0, 1.0)
    decision = decided(run(times=coarse), run(times=base))
    assert decision.verdict == CANNOT_TELL
    assert "0 s" in decision.reason


def test_few_values_show_no_noise():
    base, new = run(val_loss=[3.0, 2.0, 1.0]), run(val_loss=[3.0, 2.0, 1.1])
    assert decided(base, new).verdict == CANNOT_TELL
    assert decided(base, new, loss=Band(0.2)).verdict == PASS
    for index, each in enumerate((base, new)):
        each.series["train_loss"] = run(loss=losses(index)).series["loss"]
    assert decided(base, new).verdict == CANNOT_TELL
    assert decided(base, new).reason.startswith("val_loss is")
    assert decided(base, new, loss=Band(0.2)).reason.startswith("val_loss is")


def test_an_equal_or_lower_loss_passes_however_few_values_there_are():
    for values in ([0.5], [3.0, 2.0, 1.0], [0.9] * 40):
        assert decided(run(val_loss=values), run(val_loss=values)).verdict == PASS
    assert decided(run(val_loss=[0.5]), run(val_loss=[0.4])).verdict == PASS


@pytest.mark.parametrize(("last", "verdict"), [(0.5, PASS), (0.505, PASS), (5.0, CANNOT_TELL), (np.nan, FAIL)], ids=str)
def test_a_validation_loss_with_few_values_is_not_ignored(last, verdict):
    base = run(val_loss=[3.0, 2.0, 1.0, 0.7, 0.5], train_loss=losses(0))
    new = run(val_loss=[3.0, 2.0, 1.0, 0.7 if last < 1 else last, last], train_loss=losses(0))
    decision = decided(base, new)
    assert decision.verdict == verdict
    assert verdict == PASS or "val_loss" in decision.reason


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
    with pytest.raises(ValueError, match="--metric step time, typical is not"):
        decided(run(times=steady(0)), run(times=steady(1)), metric="step time, typical")
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


def test_a_reason_is_given_once():
    again = [decision.Decision(FAIL, "the loss is worse"), decision.Decision(FAIL, "the loss is worse")]
    assert decision._joined(again).reason == "the loss is worse"
