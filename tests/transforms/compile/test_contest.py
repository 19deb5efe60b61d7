import pytest

from lightning_ups.transforms.compile.contest import MOST_REPEATS, ROUNDS, TIMED_STEPS, WARM_STEPS, Contest


class Clock:
    """A host that takes a given time for each step, and a device that takes longer by ``behind``."""

    def __init__(self, recorded):
        self.time, self.behind, self.bytes, self.records = 0.0, 0.0, recorded, False

    def now(self):
        return self.time

    def wait(self):
        self.time, self.behind = self.time + self.behind, 0.0

    def allocated(self):
        return 2**30

    def peak(self):
        return 2**32 + (self.bytes if self.records else 0)

    def recorded(self):
        return 2**35 + (self.bytes if self.records else 0)  # some of it by others


def run(costs, *, length=1, stalls=(), recorded=2**30, evaluates=()):
    """Return the contest between ways that cost so many milliseconds, and the way of each step."""
    clock = Clock(recorded)
    contest, ran = Contest(clock, [*costs], length=length), []
    while contest.winner is None:
        way = contest.begin_step()
        ran.append(way)
        clock.records = clock.records or way == "graphs"
        clock.time += 0.1
        clock.behind += costs[way] - 0.1 + (50 if len(ran) in stalls else 0)
        if len(ran) in evaluates:
            contest.interrupt()
            clock.behind += 50
    assert contest.begin_step() == contest.winner
    return contest, ran[:-1]


@pytest.mark.parametrize(
    ("costs", "winner"),
    [
        ({"compiled": 4.0, "graphs": 5.0}, "compiled"),
        ({"compiled": 5.0, "graphs": 4.0}, "graphs"),
        ({"compiled": 3.96, "graphs": 4.0}, "graphs"),  # not clearly
        ({"uncompiled": 3.0, "compiled": 4.0, "graphs": 5.0}, "uncompiled"),
        ({"uncompiled": 6.0, "compiled": 4.0, "graphs": 5.0}, "compiled"),
    ],
)
def test_the_fastest_wins_by_the_time_of_the_device(costs, winner):
    contest, ran = run(costs)
    assert contest.winner == winner
    assert {way: contest.ms(way) for way in costs} == pytest.approx(costs)
    assert ran == [way for way in costs for _ in range(WARM_STEPS + ROUNDS * TIMED_STEPS)]
    assert f"{costs['graphs']:.3g} ms graphs" in str(contest)


def test_one_stall_decides_nothing():
    contest, _ = run({"compiled": 5.0, "graphs": 4.0}, stalls=(20,))
    assert contest.winner == "graphs"
    assert contest.ms("graphs") == pytest.approx(4.0)


def test_accumulated_batches_stay_together():
    contest, ran = run({"compiled": 3.0, "graphs": 4.0}, length=3)
    assert contest.winner == "compiled"
    assert len(ran) == 2 * 3 * (WARM_STEPS + ROUNDS * TIMED_STEPS)
    assert all(len({*ran[start : start + 3]}) == 1 for start in range(0, len(ran), 3))


@pytest.mark.parametrize(("recorded", "winner"), [(3.1 * 2**30, "graphs"), (3.5 * 2**30, "compiled")])
def test_recordings_that_take_more_memory_than_a_step_do_not_win(recorded, winner):
    contest, _ = run({"uncompiled": 9.0, "compiled": 5.0, "graphs": 2.0}, recorded=recorded)
    assert contest.winner == winner


def test_recordings_of_others_do_not_count():
    contest, _ = run({"uncompiled": 10.0, "compiled": 5.0})
    assert contest.winner == "compiled"


def test_a_round_with_an_evaluation_in_it_is_timed_once_more():
    costs, each = {"compiled": 5.0, "graphs": 4.0}, WARM_STEPS + ROUNDS * TIMED_STEPS
    evaluates = range(1, 4 * TIMED_STEPS, TIMED_STEPS)  # the first comes while it warms up
    contest, ran = run(costs, evaluates=evaluates)
    assert contest.winner == "graphs"
    assert {way: contest.ms(way) for way in costs} == pytest.approx(costs)
    assert len(ran) == 2 * each + 3 * TIMED_STEPS


def test_evaluations_in_every_round_do_not_last_for_ever():
    contest, ran = run({"compiled": 5.0, "graphs": 4.0}, evaluates=range(1000))
    assert contest.winner is not None
    assert len(ran) == 2 * (WARM_STEPS + ROUNDS * TIMED_STEPS) + MOST_REPEATS * TIMED_STEPS
