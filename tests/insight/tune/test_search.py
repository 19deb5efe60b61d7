import random
import time

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

    def __init__(self, *, fails=(), losses=(), memory=(), stops_after=10**9, noise=0.001, **options):
        super().__init__(**options)
        self.fails, self.losses, self.memory, self.noise = dict(fails), dict(losses), dict(memory), noise
        self.tried, self.stops_after, self.draw = [], stops_after, random.Random(0)

    def start(self, configuration, effort):
        if len(self.tried) >= self.stops_after:
            raise KeyboardInterrupt
        return super().start(configuration, effort)

    def _run(self, words, effort, slot):
        text = words[-1] if "--config" in words else ""
        self.tried.append(text)
        for part, failure in self.fails.items():
            if part in text:
                return Result(failure=failure, text="injected")
        rate = 100.0
        for line in text.splitlines():
            if line:
                rate *= float(line.partition(": ")[2])
        loss = next((loss for part, loss in self.losses.items() if part in text), 2.0)
        peak = next((peak for part, peak in self.memory.items() if part in text), 100)
        rate *= self.draw.gauss(1, self.noise)
        return Result(samples_per_s=rate, error=self.noise, losses=[loss], peak_bytes=peak)


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
    assert any("losses of its first steps differ by +50" in row.why for row in found.rows)


def test_the_stock_run_stays_where_nothing_is_better():
    found = searched(Table(fails={":": "crash"}))
    assert found.best.name == "stock"
    assert found.gain.verdict == "neutral"


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
    assert third.tried == []


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
