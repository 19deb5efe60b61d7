import pytest

from lightning_ups.transforms.compile.contest import MOST_REPEATS, ROUNDS, TIMED_STEPS, WARM_STEPS, Contest, HostClock


class Clock:
    """A host that takes a given time for each step, and a device that takes longer by ``behind``."""

    def __init__(self):
        self.time, self.behind, self.top, self.private = 0.0, 0.0, 2**40, 0

    def now(self):
        return self.time

    def wait(self):
        self.time, self.behind = self.time + self.behind, 0.0

    def reset_peak(self):
        self.top = 0

    def peak(self):
        return self.top

    def recorded(self):
        return 2**32 + self.private  # some of it by others


def run(costs, *, length=1, stalls=(), memory=None, evaluates=(), **options):
    """Return the contest between ways that cost so many milliseconds and bytes, and the way of each step."""
    clock, memory = Clock(), memory or {}
    contest, ran = Contest(clock, [*costs], length=length, **options), []
    while contest.winner is None:
        way = contest.begin_step()
        ran.append(way)
        clock.private = 2**30 if way == "graphs" else 0
        clock.top = max(clock.top, memory.get(way, 2**34) - clock.private)
        clock.time += 0.1
        clock.behind += costs[way] - 0.1 + (50 if len(ran) in stalls else 0)
        if len(ran) in evaluates:
            contest.interrupt()
            clock.behind += 50
            clock.top = max(clock.top, 2**36)
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


GIB = 2**30


@pytest.mark.parametrize(
    ("memory", "spare", "winner"),
    [
        ({"compiled": 20 * GIB, "graphs": 20.9 * GIB}, 0, "graphs"),
        ({"compiled": 20 * GIB, "graphs": 21.1 * GIB}, 0, "compiled"),
        ({"compiled": 20 * GIB, "graphs": 21.1 * GIB}, GIB, "graphs"),  # which is less than uncompiled
        ({"uncompiled": 25 * GIB, "compiled": 20 * GIB, "graphs": 26 * GIB}, 0, "graphs"),
        ({"uncompiled": 15 * GIB, "compiled": 20 * GIB, "graphs": 26 * GIB}, 0, "uncompiled"),
        ({"compiled": 4.1 * GIB, "graphs": 4.13 * GIB}, 0, "graphs"),
    ],
)
def test_what_takes_more_memory_than_a_step_uncompiled_does_not_win(memory, spare, winner):
    costs = {"uncompiled": 9.0, "compiled": 5.0, "graphs": 2.0}
    contest, _ = run({way: costs[way] for way in memory}, memory=memory, spare=spare)
    assert contest.winner == winner
    assert f"graphs ({memory['graphs'] / 2**20:.0f} MiB)" in str(contest)


def test_a_model_with_many_parameters_may_take_more():
    memory = {"compiled": 20 * GIB, "graphs": 21.1 * GIB}
    for more, winner in ((GIB, "compiled"), (1.2 * GIB, "graphs")):
        contest, _ = run({"compiled": 5.0, "graphs": 2.0}, memory=memory, more=more)
        assert contest.winner == winner


def test_a_round_with_an_evaluation_in_it_is_timed_once_more():
    costs, each = {"compiled": 5.0, "graphs": 4.0}, WARM_STEPS + ROUNDS * TIMED_STEPS
    evaluates = range(1, 4 * TIMED_STEPS, TIMED_STEPS)  # the first comes while it warms up
    contest, ran = run(costs, evaluates=evaluates)
    assert contest.winner == "graphs"
    assert {way: contest.ms(way) for way in costs} == pytest.approx(costs)
    assert str(2**36 // 2**20) not in str(contest)  # the memory of an evaluation
    assert len(ran) == 2 * each + 3 * TIMED_STEPS


def test_evaluations_in_every_round_do_not_last_for_ever():
    contest, ran = run({"compiled": 5.0, "graphs": 4.0}, evaluates=range(1000))
    assert contest.winner is not None
    assert len(ran) == 2 * (WARM_STEPS + ROUNDS * TIMED_STEPS) + MOST_REPEATS * TIMED_STEPS


@pytest.mark.parametrize(
    ("costs", "usual", "winner"),
    [
        ({"compiled": 5.0, "step": 4.0}, "compiled", "step"),
        ({"compiled": 5.0, "step": 4.99}, "compiled", "compiled"),
        ({"uncompiled": 4.0, "compiled": 5.0, "step": 5.0}, "compiled", "uncompiled"),
    ],
)
def test_the_usual_way_stays_unless_another_is_clearly_faster(costs, usual, winner):
    contest, _ = run(costs, usual=usual)
    assert contest.winner == winner


def test_a_host_by_itself_has_a_clock():
    contest, clock = Contest(HostClock(), ["compiled", "step"]), HostClock()
    while contest.winner is None:
        start = clock.now()
        wanted = 0.2 if contest.begin_step() == "step" else 1.0
        while clock.now() - start < wanted:
            pass
    assert contest.winner == "step"
