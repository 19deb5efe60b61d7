import numpy as np
import pytest

from lightning_ups.insight.compare.differences import ABSENT, MEAN_STEP, STEP, Side, different_settings, effects
from tests.insight.compare.synthetic import losses, run, series, step_times


def compared(base, new, **options):
    sides = [Side(name, each if isinstance(each, list) else [each]) for name, each in (("base", base), ("new", new))]
    return {effect.name: effect for effect in effects(*sides, **options)}


def pair(index, *, factor=1.0):
    return run(times=step_times(2 * index)), run(times=factor * step_times(2 * index + 1))


def test_three_percent_are_found_in_ten_of_ten_runs():
    found = [compared(*pair(index, factor=1.03))[STEP] for index in range(10)]
    assert [effect.verdict for effect in found] == ["significant"] * 10
    assert all(0.02 < effect.difference.value < 0.04 for effect in found)


def test_ten_identical_pairs_report_nothing():
    for index in range(10):
        assert {effect.verdict for effect in compared(*pair(index)).values()} == {"noise"}


def test_faster_is_found_too():
    effect = compared(*pair(0, factor=0.95))[STEP]
    assert effect.verdict == "significant"
    assert effect.difference.value == pytest.approx(-0.05, abs=0.01)


def test_stalls_show_in_the_mean_alone():
    base, new = (0.1 + 0.001 * np.random.default_rng(seed).normal(size=600) for seed in (0, 1))
    new[::25] += 0.2
    found = compared(run(times=base), run(times=new))
    assert found[STEP].verdict == "noise"
    assert found[MEAN_STEP].verdict == "significant"
    assert found[MEAN_STEP].difference.value == pytest.approx(0.08, abs=0.01)


def test_differences_below_one_percent_need_several_runs():
    rng = np.random.default_rng(0)
    times = [0.1 * (1 + 0.001 * rng.normal(size=400)) * (1.005 if index > 2 else 1) for index in range(6)]
    runs = [run(times=each) for each in times]
    assert compared(runs[0], runs[3])[STEP].verdict == "noise"
    assert compared(runs[:3], runs[3:])[STEP].verdict == "significant"


def test_steps_are_matched_by_number_and_the_first_tenth_is_left_out():
    base = run(loss=[1.0])
    base.times["a column"] = series(np.full(100, 0.1))
    new = run(loss=[1.0])
    new.times["a column"] = series(np.r_[np.full(50, 9.9), np.full(100, 0.1)], first=-50)
    effect = compared(base, new)[STEP]
    assert effect.points == 90
    assert effect.difference.value == pytest.approx(0)
    assert effect.note == "from a column"
    assert compared(base, new, warmup=40)[STEP].points == 60


def test_runs_without_a_common_step_are_not_tested():
    base, new = run(loss=series(losses(0))), run(loss=series(losses(1), first=1000))
    for each in (base, new):
        each.times["a column"] = each.series["loss"]
    found = compared(base, new)
    assert found[STEP].verdict == found["loss"].verdict == "not tested"
    assert "no step in common" in found[STEP].note


def test_the_best_source_that_both_have_is_used():
    base, new = run(times=step_times(0)), run()
    base.times["a clock"] = new.times["a clock"] = series(step_times(1))
    found = compared(base, new)
    assert found[STEP].note == "from a clock"
    assert MEAN_STEP not in found  # a clock counts validation, too


def test_one_run_per_side_never_calls_a_loss_significant():
    near = compared(run(loss=losses(0)), run(loss=losses(1)))["loss"]
    far = compared(run(loss=losses(0)), run(loss=losses(1, end=2.2)))["loss"]
    assert near.verdict == "noise"
    assert far.verdict == "beyond batch noise"
    assert far.difference.value == pytest.approx(0.2, abs=0.05)
    assert far.points == 40  # the last tenth


def test_seeds_give_the_band_of_a_loss():
    base = [run(loss=losses(seed, end=2 + 0.02 * (seed % 3))) for seed in range(3)]
    near = [run(loss=losses(seed, end=2.02 + 0.02 * (seed % 3))) for seed in range(3, 6)]
    far = [run(loss=losses(seed, end=2.3 + 0.02 * (seed % 3))) for seed in range(3, 6)]
    assert compared(base, near)["loss"].verdict == "noise"
    assert compared(base, far)["loss"].verdict == "significant"


def test_losses_that_still_fall_are_compared_by_their_ratio():
    steps = np.arange(30.0)
    slow, fast = (np.exp(-steps / each) for each in (25, 5))
    effect = compared(run(loss=slow), run(loss=fast))["loss"]
    assert effect.verdict == "beyond batch noise"
    assert effect.relative
    assert effect.note == "still falling: 0.415 to 0.34 and 0.0128 to 0.0047"
    assert effect.falling.keys() == {"base", "new"}
    assert compared(run(loss=slow), run(loss=slow * np.exp(0.1 * np.sin(steps))))["loss"].verdict == "noise"
    # The first has ended to fall, so that the second alone does.
    for level, is_relative in ((1.0, True), (-1.0, False)):
        effect = compared(run(loss=np.full(30, level)), run(loss=fast))["loss"]
        assert (effect.relative, [*effect.falling]) == (is_relative, ["new"])


@pytest.mark.parametrize("noise", [0.02, 0.2])
def test_a_loss_at_its_end_does_not_fall(noise):
    for seed in range(20):
        effect = compared(run(loss=losses(seed, noise=noise)), run(loss=losses(100 + seed, noise=noise)))["loss"]
        assert not effect.falling
        assert not effect.relative


def test_equal_losses_are_identical_and_the_first_difference_is_named():
    values = losses(0)
    other = values.copy()
    other[123] += 1e-9
    assert compared(run(loss=values), run(loss=values))["loss"].verdict == "identical"
    assert compared(run(loss=values), run(loss=other))["loss"].note == "identical before step 123"


def test_a_loss_that_is_not_finite():
    values = losses(0)
    values[-3] = np.nan
    assert compared(run(loss=losses(0)), run(loss=values))["loss"].verdict == "not finite"


def test_a_loss_that_is_not_finite_after_the_last_common_step():
    values = losses(0, count=450)
    values[440:] = np.inf
    effect = compared(run(loss=losses(1)), run(loss=values))["loss"]
    assert effect.verdict == "not finite"
    assert effect.note == "new is not finite at step 440"
    values[440:], values[100] = 2.0, np.nan
    assert compared(run(loss=losses(1)), run(loss=values))["loss"].verdict == "noise"  # it recovered


def test_step_times_are_compared_by_their_ratio_without_steps_of_zero():
    base, new = step_times(0), 1.1 * step_times(1)
    new[300:310] = 0
    base[100] = np.nan
    found = compared(run(times=base), run(times=new))
    for name in (STEP, MEAN_STEP):
        assert found[name].relative
        assert found[name].difference.value == pytest.approx(0.1, abs=0.02 if name == STEP else 0.05)
    assert "11 steps of 0 s left out" in found[STEP].note
    coarse = np.where(np.arange(600) % 3, 0.0, 1.0)
    found = compared(run(times=coarse), run(times=base))
    assert found[STEP].verdict == "not tested"
    assert "0 s" in found[STEP].note
    assert MEAN_STEP not in found


def test_few_values_are_not_tested():
    assert compared(run(val_loss=[3.0, 2.0, 1.0]), run(val_loss=[3.0, 2.0, 1.1]))["val_loss"].verdict == "not tested"


def test_memory_and_rates_are_compared_by_their_ratio_and_nothing_twice():
    names = ("memory/allocated_gib", "throughput/tokens_per_s", "throughput/step_ms", "throughput/step_p95_ms")
    base = run(times=step_times(0), **{name: np.full(20, 10.0) for name in names})
    new = run(times=step_times(1), **{name: np.full(20, 11.0) for name in names})
    found = compared(base, new)
    assert [*found] == [STEP, MEAN_STEP, "memory/allocated_gib", "throughput/tokens_per_s"]
    assert found["memory/allocated_gib"].verdict == "significant"
    assert found["memory/allocated_gib"].difference.value == pytest.approx(0.1)


def test_values_that_are_zero_are_compared_by_their_difference():
    effect = compared(run(**{"memory/retries": np.zeros(20)}), run(**{"memory/retries": np.ones(20)}))["memory/retries"]
    assert not effect.relative
    assert effect.difference.value == 1


def test_settings_that_differ_between_the_sides():
    def settings(lr, seed, **others):
        return run(settings={"versions/torch": "2", "lr": lr, "seed": seed} | others)

    base = Side("base", [settings(1, 0), settings(1, 1)])
    new = Side("new", [settings(2, 2, **{"versions/x": 1}), settings(2, 3, **{"versions/x": 1})])
    assert different_settings([base, new]) == {"lr": [1, 2], "versions/x": [ABSENT, 1]}
    assert different_settings([base, Side("none", [run()])]) == {}
    named_otherwise = run(settings={"optimizers/0/lr": 1}, manifest={"schema": 1})
    assert different_settings([base, Side("manifest", [named_otherwise])]) == {}
