import random
import time
from dataclasses import replace

import pytest

from lightning_ups.insight.tune import (
    Axis,
    Configuration,
    Engine,
    Result,
    Row,
    Search,
    Setting,
    Situation,
    Space,
    Store,
    Verification,
    text_of,
)

# The factor by which a setting changes the rate, which is in its name and in its fragment.
AXES = [
    Axis(name="a", settings=[Setting(name="1"), *(Setting(name=x, yaml=f"a: {x}") for x in ("1.2", "0.8", "1.5"))]),
    Axis(name="b", settings=[Setting(name="1"), Setting(name="1.3", yaml="b: 1.3")], start="1.3"),
    Axis(name="c", settings=[Setting(name="1"), Setting(name="1.0", yaml="c: 1.0")]),
    Axis(
        name="d", settings=[Setting(name="1"), Setting(name="9.0", yaml="d: 9.0"), Setting(name="1.1", yaml="d: 1.1")]
    ),
]


class Table(Engine):
    """Returns rates by the fragments of a configuration, with noise and failures."""

    def __init__(
        self, *, fails=(), fails_late=(), losses=(), memory=(), stops_after=10**9, noise=0.001, seconds=0.0, **options
    ):
        super().__init__(**options)
        self.fails_late, self.seconds = dict(fails_late), seconds
        self.fails, self.losses, self.memory, self.noise = dict(fails), dict(losses), dict(memory), noise
        self.tried, self.stops_after, self.draw = [], stops_after, random.Random(0)

    def start(self, configuration, effort):
        if len(self.tried) >= self.stops_after:
            raise KeyboardInterrupt
        return super().start(configuration, effort)

    def _run(self, words, effort, slot):
        text = words[-1] if "--config" in words else ""
        self.tried.append(text)
        time.sleep(self.seconds)
        for part, failure in (self.fails | (self.fails_late if effort.round else {})).items():
            if part in text:
                return Result(failure=failure, text="injected")
        rate = 100.0
        for line in text.splitlines():
            if line:
                rate *= float(line.partition(": ")[2])
        loss = next((loss for part, loss in self.losses.items() if part in text), 2.0)
        peak = next((peak for part, peak in self.memory.items() if part in text), 100)
        rate *= self.draw.gauss(1, self.noise)
        losses = loss if isinstance(loss, list) else [loss]
        return Result(samples_per_s=rate, error=self.noise, losses=losses, peak_bytes=peak)


def sound(_):
    return Verification(rejects=False, text="passed")


def searched(engine, *, admit=lambda _: None, verify=sound, seconds=60.0, **options):
    space = Space(Situation(), AXES)

    def configuration(choice):
        tree = space.tree(choice)
        return Configuration(words=["--x"], preset="none", fragments=[text_of(tree)] if tree else [])

    with engine:
        search = Search(
            engine,
            space,
            configuration=configuration,
            admit=admit,
            verify=verify,
            deadline=time.monotonic() + seconds,
            **options,
        )
        stock = Row(name="stock", choice=None, configuration=configuration(space.stock))
        return search.run([stock, Row(name="preset", choice=None, configuration=Configuration(words=["--x"]))])


def test_the_fastest_combination_is_found_and_useless_settings_are_left_out():
    found = searched(Table(fails={"9.0": "crash"}))
    assert found.is_complete
    assert found.best.choice == {"a": "1.5", "b": "1.3", "c": "1", "d": "1.1"}
    assert found.best.verified == "passed"
    assert found.gain.value == pytest.approx(1.5 * 1.3 * 1.1 - 1, abs=0.02)
    assert found.gains == {
        "a": pytest.approx(0.5, abs=0.02),
        "b": pytest.approx(0.3, abs=0.02),
        "d": pytest.approx(0.1, abs=0.02),
    }


@pytest.mark.parametrize("failure", ["out of memory", "hang", "crash", "compiler error", "refused"])
def test_a_failure_costs_one_row(failure):
    engine = Table(fails={"9.0": failure, "1.3": failure})  # of the start as well
    found = searched(engine)
    assert found.best.choice == {"a": "1.5", "b": "1", "c": "1", "d": "1.1"}
    assert len(engine.tried) < 40


def test_what_cannot_work_is_not_run():
    engine = Table()
    found = searched(engine, admit=lambda each: "does not fit" if "9.0" in " ".join(each.fragments) else None)
    assert found.best.choice["d"] == "1.1"
    assert not any("9.0" in text for text in engine.tried)
    assert any(row.why == "does not fit" for row in found.rows)


def test_what_verify_rejects_never_wins():
    def verify(configuration):
        rejects = "9.0" in " ".join(configuration.fragments)
        return Verification(rejects=rejects, text="gradients differ" if rejects else "passed")

    found = searched(Table(), verify=verify)
    assert found.best is not None
    assert (found.best.choice or {}).get("d") != "9.0"
    assert any(row.why == "rejected by verify: gradients differ" for row in found.rows)


def test_what_changes_the_losses_never_wins():
    found = searched(Table(losses={"9.0": 3.0}))
    assert (found.best.choice or {}).get("d") != "9.0"
    assert any("mean loss of 1 steps differs by +50" in row.why for row in found.rows)


@pytest.mark.parametrize("failure", ["out of memory", "hang", "crash"])
def test_what_fails_in_the_final_never_wins(failure):
    found = searched(Table(fails_late={"9.0": failure}))
    assert found.best.choice["d"] != "9.0"
    assert found.gain.low > 0.3
    assert any(row.why == f"failed in the final: {failure}: injected" for row in found.rows)


def test_if_all_finalists_fail_the_next_best_are_tried():
    found = searched(Table(fails={"9.0": "crash"}, fails_late={"a: 1.5": "crash"}))
    assert found.best.choice["a"] != "1.5"
    assert found.gain.low > 0.2


def test_a_stock_run_that_fails_in_the_final_leaves_the_gain_unknown():
    found = searched(Table(fails={":": "crash"}, fails_late={"": "crash"}))
    assert found.best is None
    found = searched(Table(noise=0.0001, fails_late={"none": "crash"}))
    assert found.best.choice["d"] == "9.0"


@pytest.mark.parametrize(
    ("losses", "why"),
    [
        ([2.0, float("nan"), 2.0], "the loss of step 2 is nan"),
        ([2.0, 1.9, float("inf")], "the loss of step 3 is inf"),
        ([2.0, 2.0, 2.0, 2.0], "the loss is 2 in each step"),
        ([], "no loss was recorded"),
    ],
)
def test_what_has_no_losses_like_stock_never_wins(losses, why):
    found = searched(Table(losses={"9.0": losses, "": [2.0, 1.99, 2.01, 1.98]}))
    assert (found.best.choice or {}).get("d") == "1.1"
    assert f"rejected: {why}" in [row.why for row in found.rows]


def test_losses_of_the_final_count_too():
    class Late(Table):
        def _run(self, words, effort, slot):
            found = super()._run(words, effort, slot)
            wrong = effort.round and "9.0" in words[-1]
            return replace(found, losses=[2.0] * 7 + [9.0 if wrong else 2.1] if effort.round else [2.0])

    found = searched(Late())
    assert (found.best.choice or {}).get("d") != "9.0"
    assert any("differs by" in row.why for row in found.rows)


def test_where_the_stock_run_records_no_losses_the_row_says_so():
    found = searched(Table(losses={"": []}))
    assert found.best.verified == "passed; no losses to compare"


def test_what_is_equal_is_seldom_called_faster_in_a_short_search():
    wins = 0
    for seed in range(40):
        engine = Table(noise=0.05)
        engine.fails = dict.fromkeys(("a:", "b:", "d:"), "crash")  # what is left has no effect
        engine.draw.seed(seed)
        wins += searched(engine, seconds=0.0).best.name != "stock"
    assert wins <= 2


def test_a_search_that_is_late_has_two_rounds_for_an_interval():
    engine = Table(seconds=0.02)
    found = searched(engine, seconds=0.6)
    assert len(found.best.finals) >= 2


def test_with_time_for_one_round_a_large_gain_is_still_found():
    class Slow(Table):
        def _run(self, words, effort, slot):
            time.sleep(1.0 if effort.round else 0.0)
            return super()._run(words, effort, slot)

    found = searched(Slow(noise=0.02), seconds=0.9)
    assert len(found.best.finals) == 1
    assert (found.best.choice or {}).get("d") == "9.0"
    assert found.gain.is_known
    assert found.gain.low > 1.0


def test_progress_names_what_runs_and_the_time_that_is_left():
    seen = []
    searched(Table(seconds=0.01), show=seen.append)
    doing = " ".join(each.doing for each in seen)
    for part in (
        "the run as it is, 1 of",
        "single changes, 2 of",
        "combination",
        "verify",
        "final, round 2 of at most 5",
    ):
        assert part in doing
    assert all(each.left_s <= 60.0 for each in seen)
    assert any(each.running == ["b: 1.3, d: 9.0"] for each in seen)
    assert any(each.step_left_s for each in seen)
    assert seen[-1].running == []


def test_the_time_of_verify_is_not_that_of_the_search():
    def slow(_):
        time.sleep(0.5)
        return Verification(rejects=False, text="passed")

    found = searched(Table(), verify=slow, seconds=1.2)
    assert len(found.best.finals) >= 2


def test_cost_compares_samples_of_a_device():
    class Halves(Table):
        def _run(self, words, effort, slot):
            found = super()._run(words, effort, slot)
            return replace(found, devices=1 if "d: 1.1" in words[-1] else 4)

    found = searched(Halves(fails={"9.0": "crash"}), objective="cost")
    assert found.best.choice["d"] == "1.1"
    assert found.gain.value == pytest.approx(4 * 1.1 * 1.3 * 1.5 - 1, rel=0.02)


def test_the_stock_run_stays_where_nothing_is_better():
    found = searched(Table(fails={":": "crash"}))
    assert found.best.name == "stock"
    assert found.gain is None


def test_an_interrupted_search_returns_the_best_so_far_and_resumes(tmp_path):
    options = {"store": Store(tmp_path), "fails": {"9.0": "crash"}}
    first = Table(stops_after=8, **options)
    found = searched(first)
    assert not found.is_complete
    assert found.best is not None
    second = Table(store=Store(tmp_path), fails={"9.0": "crash"})
    found = searched(second)
    assert found.best.choice == {"a": "1.5", "b": "1.3", "c": "1", "d": "1.1"}
    third = Table(store=Store(tmp_path), fails={"9.0": "crash"})
    assert searched(third).best.choice == found.best.choice
    assert not third.tried, "what crashed is not repeated"


@pytest.mark.parametrize(("rounds", "d"), [(0, "1.1"), (1, "1")])
def test_a_final_that_is_interrupted_counts_once_each_row_has_a_round(rounds, d):
    class Interrupted(Table):
        def start(self, configuration, effort):
            if effort.round == rounds + 1 and not configuration.fragments:  # stock is the last of a round
                raise KeyboardInterrupt
            return super().start(configuration, effort)

        def _run(self, words, effort, slot):
            found = super()._run(words, effort, slot)
            slower = 0.5 if effort.round and "d: 1.1" in words[-1] else 1.0
            return replace(found, samples_per_s=slower * found.samples_per_s)

    found = searched(Interrupted(fails={"9.0": "crash"}))
    assert not found.is_complete
    assert found.best.choice["d"] == d


def test_a_schedule_that_comes_after_another_number_of_steps_never_wins():
    class Scheduled(Table):
        def _run(self, words, effort, slot):
            return replace(super()._run(words, effort, slot), schedules=[2 if "d: 1.1" in words[-1] else 1])

    found = searched(Scheduled(fails={"9.0": "crash"}))
    assert found.best.choice["d"] == "1"
    assert "learning rates" in next(row.why for row in found.rows if "d: 1.1" in row.name)


def test_the_deadline_ends_the_search():
    found = searched(Table(), seconds=0.0)
    assert found.best is not None
    assert len(found.rows) < 8


def test_memory_can_be_the_objective():
    found = searched(Table(memory={"a: 0.8": 40}), objective="memory")
    assert found.best.choice["a"] == "0.8"


def test_a_gain_within_the_noise_keeps_the_stock_run():
    for seed in range(5):
        engine = Table(noise=0.1)
        engine.fails = dict.fromkeys(("a:", "b:", "d:"), "crash")  # what is left has no effect
        engine.draw.seed(seed)
        found = searched(engine)
        assert found.best.name == "stock", found.gain
