"""The search of `tune`: single changes, their combination, and a final between the best few."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

from lightning_ups.insight.tune.axes import Choice, Objective, Space
from lightning_ups.insight.tune.effects import Gain, Rounds, loss_fault
from lightning_ups.insight.tune.engine import Configuration, Effort, Engine
from lightning_ups.insight.tune.result import Result

_PROMISING = 0.97  # of the best short trial
_HOPELESS = 0.9  # of the best
_MORE = 0.005  # by which another setting must be better, and the stock setting may be worse
_FINALISTS = 3
_NEAR = 0.9  # of the best; others are not worth a final
_ROUNDS = 5
_SEARCHING, _FINALS = 0.7, 0.85  # shares of the time


@dataclass(kw_only=True)
class Row:
    """A configuration and what is known of it.

    Args:
        name: What differs from the stock run.
        choice: Its settings; None: a run as the user or a preset has it.
        configuration: What a trial runs.
        result: The best-known result; None: it was not run.
        finals: Results of the final, by round.
        why: Why it was not run, or was rejected.
        verified: What `verify` found; None: it was not asked.
    """

    name: str
    choice: Choice | None
    configuration: Configuration
    result: Result | None = None
    finals: list[Result] = field(default_factory=list)
    why: str = ""
    verified: str | None = None

    @property
    def has_worked(self) -> bool:
        """Whether it was measured, and not rejected."""
        return self.result is not None and self.result.failure is None and not self.why


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The state of a search.

    Args:
        rows: All rows, also those that were not run yet.
        doing: The step of the search, with its count.
        running: What runs now.
        passed_s: Seconds since the start.
        left_s: Seconds that may be left at most, without those of verification.
        step_left_s: Seconds that this step may still take; None: not known.
    """

    rows: Sequence[Row]
    doing: str
    running: Sequence[str]
    passed_s: float
    left_s: float
    step_left_s: float | None


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What `verify` says: whether it rejects a configuration, and in which words."""

    rejects: bool
    text: str


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a search found. ``best`` is None if nothing works; ``gain`` is that over the stock run, if it is another."""

    rows: Sequence[Row]
    best: Row | None
    gain: Gain | None
    gains: Mapping[str, float]  # of each setting of the best choice, by axis
    is_complete: bool


class Search:
    """Looks for the best choice of a space.

    Args:
        engine: Runs trials.
        space: The axes.
        configuration: Returns the configuration of a choice.
        admit: Returns why a configuration cannot work, or None.
        verify: Checks that a configuration trains as the plain model does.
        objective: What is improved.
        seconds: Of a trial at its full length.
        limit: Seconds after which a trial is killed.
        deadline: By `time.monotonic`; trials that are under way then are awaited.
        show: Called with the progress after each change.
    """

    def __init__(
        self,
        engine: Engine,
        space: Space,
        *,
        configuration: Callable[[Choice], Configuration],
        admit: Callable[[Configuration], str | None],
        verify: Callable[[Configuration], Verification],
        objective: Objective = "throughput",
        seconds: float = 10.0,
        limit: float = 300.0,
        deadline: float,
        show: Callable[[Progress], None] = lambda _: None,
    ) -> None:
        self._engine, self._space, self._configuration = engine, space, configuration
        self._admit, self._verify, self._on_progress = admit, verify, show
        self._objective: Objective = objective
        self._full = {"seconds": seconds, "limit": limit}
        self._short: dict[str, Any] = {"seconds": seconds / 3, "limit": limit, "precision": 0.02}
        self._began, self._deadline = time.monotonic(), deadline
        self._verifying_s = 0.0
        self.rows: list[Row] = []
        self._by_choice: dict[tuple[tuple[str, str], ...], Row] = {}
        self._stock: Row | None = None
        self._finalists_now: Sequence[Row] = ()
        self._hopeless: set[tuple[str, str]] = set()
        self._doing, self._running = "", list[str]()
        self._planned = 0  # trials of this step that did not start
        self._durations: list[float] = []  # of trials, and of those that ran at once

    def run(self, given: Sequence[Row]) -> Outcome:
        """Search, and return the outcome: after Ctrl-C too, with what is known by then.

        Args:
            given: Configurations to beat. The first is the stock run.
        """
        best: Row | None = None
        try:
            self.rows = [*given]
            self._stock = given[0]
            self._stock.choice = self._space.stock
            self._by_choice[_key(self._space.stock)] = self._stock
            self._measure(given, self._full, doing="the run as it is")
            best = self._final(self._searched())
        except KeyboardInterrupt:
            return self._outcome(self._best_so_far(), is_complete=False)
        return self._outcome(best, is_complete=True)

    def score(self, row: Row) -> float:
        """Return the figure that is improved; more is better."""
        return self._figure(row.result) if row.result is not None and row.has_worked else 0.0

    def _figure(self, result: Result) -> float:
        if self._objective == "memory":
            return 1e12 / max(result.peak_bytes, 1)
        return result.samples_per_s / (result.devices if self._objective == "cost" else 1)

    # Single changes and their combination

    def _searched(self) -> Row | None:
        start = self._row(self._space.start)
        stock = self._row(self._space.stock)
        self._measure([start, stock], self._full, doing="settings that are fast on most machines")
        best = start if self.score(start) >= self.score(stock) else stock
        while not self._is_late(_SEARCHING):
            improved = self._combined(best, self._alternatives(best))
            if improved is best:
                break
            best = improved
        return best

    def _alternatives(self, best: Row) -> list[tuple[str, str, float]]:
        """Measure each choice that differs in one axis; return axis, setting and score, the best first."""
        assert best.choice is not None
        found = [
            (axis, self._row(choice))
            for axis, choice in self._space.neighbors(best.choice)
            if (axis, choice[axis]) not in self._hopeless
        ]
        effort = {**self._short, "floor": self._floor(best)}
        self._measure([row for _, row in found], effort, doing="single changes")
        self._hopeless |= {(axis, (row.choice or {})[axis]) for axis, row in found if self._is_hopeless(row, best)}
        scores = [(axis, (row.choice or {})[axis], self.score(row)) for axis, row in found if row.has_worked]
        return sorted(scores, key=lambda each: -each[2])

    def _is_hopeless(self, row: Row, best: Row) -> bool:
        """Return whether a setting need not be tried again when others have changed."""
        if row.result is None or row.result.failure == "out of memory":
            return False
        return row.result.failure is not None or self.score(row) < _HOPELESS * self.score(best)

    def _combined(self, best: Row, alternatives: Sequence[tuple[str, str, float]]) -> Row:
        """Add one change after another, each if the run is better with it."""
        for axis, setting, score in alternatives:
            assert best.choice is not None
            if self._is_late(_SEARCHING):
                break
            is_stock = setting == self._space.stock[axis]
            if best.choice[axis] == setting or score < _PROMISING * self.score(best):
                continue
            if not self._space.keeps_samples(choice := {**best.choice, axis: setting}):
                continue
            row = self._row(choice)
            self._measure([row], {**self._full, "floor": self._floor(best)}, doing="combination", again=True)
            # A file with fewer lines is better than one that is as fast.
            wanted = self.score(best) * (1 - _MORE if is_stock else 1 + _MORE)
            if row.has_worked and self.score(row) > wanted:
                best = row
        return best

    def _row(self, choice: Choice) -> Row:
        key = _key(choice)
        if key not in self._by_choice:
            named = [f"{axis}: {setting}" for axis, setting, _ in self._space.parts(choice)]
            row = Row(name=", ".join(named), choice=choice, configuration=self._configuration(choice))
            self._by_choice[key] = row
            self.rows.append(row)
        return self._by_choice[key]

    def _measure(self, rows: Sequence[Row], effort: Mapping[str, Any], *, doing: str, again: bool = False) -> None:
        """Run the rows that were not run, several at once; ``again``: also those that had a short trial."""
        wanted = [row for row in rows if not row.why and (row.result is None or (again and row.result.failure is None))]
        self._planned = len(wanted)
        started = []
        for index, row in enumerate(wanted):
            if self._is_late(_SEARCHING) and any(each.has_worked for each in self.rows):
                break
            self._doing = f"{doing}, {index + 1} of {len(wanted)}"
            self._planned -= 1
            if (why := self._admit(row.configuration)) is not None:
                row.why = why
                self._show()
                continue
            started.append((row, self._engine.start(row.configuration, Effort(**effort))))
            if len(started) % self._engine.parallel == 0:
                self._await(started)
                started = []
        self._await(started)

    def _await(self, started: Sequence[Any]) -> None:
        self._running = [row.name for row, _ in started]
        began = time.monotonic()
        self._show()
        for row, future in started:
            row.result = future.result()
            self._reject_wrong_losses(row)
            self._running.remove(row.name)
            self._show()
        if started:
            self._durations.append(time.monotonic() - began)

    def _show(self) -> None:
        now, left = time.monotonic(), None
        if self._durations and self._planned:
            recent = self._durations[-10:]
            left = ceil(self._planned / self._engine.parallel) * sum(recent) / len(recent)
        self._on_progress(
            Progress(
                rows=self.rows,
                doing=self._doing,
                running=[*self._running],
                passed_s=now - self._began + self._verifying_s,
                left_s=max(0.0, self._deadline - now),
                step_left_s=left,
            )
        )

    def _floor(self, best: Row) -> float:
        return best.result.samples_per_s if best.result is not None and self._objective == "throughput" else 0.0

    def _is_late(self, share: float) -> bool:
        return time.monotonic() > self._began + share * (self._deadline - self._began)

    # The final

    def _best(self, rows: Sequence[Row]) -> Row | None:
        return max((row for row in rows if row.has_worked), key=self.score, default=None)

    def _best_so_far(self) -> Row | None:
        """Return the winner of a final of which all rows have a round, or the best by trials."""
        self._running = []
        final = [row for row in self._finalists_now if row.has_worked]
        return self._winner(final) if final and all(row.finals for row in final) else self._best(self.rows)

    def _final(self, best: Row | None) -> Row | None:
        """Return the best of the best few that trains as the plain model does, measured by turns."""
        while best is not None and (finalists := self._finalists(best)):
            self._rounds(finalists)
            left = [row for row in finalists if row.has_worked]
            if any(row is not self._stock for row in left) or len(left) == len(finalists) or self._is_late(_FINALS):
                return self._winner(left)
            best = self._best(self.rows)  # the finalists have failed, but others may not
        return None

    def _finalists(self, best: Row) -> list[Row]:
        ranked = sorted((row for row in self.rows if row.has_worked), key=lambda row: -self.score(row))
        # The search has preferred the choice with fewer settings among equals.
        ranked = [*([best] if best.has_worked else []), *(row for row in ranked if row is not best)]
        finalists: list[Row] = []
        while ranked and len(finalists) < _FINALISTS:
            row = ranked.pop(0)
            is_near = not finalists or self.score(row) > _NEAR * self.score(finalists[0])
            if is_near and self._is_sound(row):
                finalists.append(row)
        if finalists and self._stock is not None and self._stock.has_worked and self._stock not in finalists:
            finalists.append(self._stock)  # for the gain
        return finalists

    def _winner(self, finalists: list[Row]) -> Row | None:
        if len(finalists) < 2 or self._objective == "memory":
            return max(finalists, key=self.score, default=None)
        known = self._known(finalists, rounds_are_over=True)
        if self._stock is not None and self._stock in finalists:  # a setting stays if it is better beyond doubt
            better = [row for row in finalists if known.gain(row.name, self._stock.name).low > 0]
            finalists = better or [self._stock]
        fastest = max(finalists, key=lambda row: known.gain(row.name, finalists[0].name).value)
        return fastest if known.gain(fastest.name, finalists[0].name).low > 0 else finalists[0]

    def _rounds(self, rows: Sequence[Row]) -> None:
        self._finalists_now = rows
        for row in rows:
            row.finals = []
        for number in range(_ROUNDS):
            # One round has no interval, so that a second is taken up to the deadline.
            if len(rows) < 2 or (number and self._is_late(1.0 if number == 1 else _FINALS)):
                return
            for index, row in enumerate(rows):  # one at a time: neighbors would take of the host's cores
                self._doing = f"final, round {number + 1} of at most {_ROUNDS}"
                self._planned = len(rows) - index - 1
                self._play(row, number)
            for row in rows:
                self._reject_wrong_losses(row)
            rows = [row for row in rows if row.has_worked]
            if not rows:
                return
            known = self._known(rows)
            gains = [known.gain(row.name, rows[0].name) for row in rows[1:]]
            if all(gain.low > 0 or gain.high < 0 for gain in gains):
                return

    def _play(self, row: Row, number: int) -> None:
        """Run a round of the final for one row. A failure rejects it."""
        self._running = [row.name]
        self._show()
        found = self._engine.run(row.configuration, Effort(**self._full, round=number + 1))
        self._running = []
        if found.failure is not None:
            row.why = f"failed in the final: {found.failure_line}"
        else:
            row.finals.append(found)
        self._show()

    def _known(self, rows: Sequence[Row], *, rounds_are_over: bool = False) -> Rounds:
        # One round has no interval. If there is no time for another, the trials of the search count as one.
        counts = rounds_are_over and min(len(row.finals) for row in rows) == 1 and all(row.result for row in rows)
        played = {row.name: [row.result, *row.finals] if counts else row.finals for row in rows}
        return Rounds({name: [self._scored(each) for each in found if each] for name, found in played.items()})

    def _scored(self, result: Result) -> Result:
        return result if self._objective == "memory" else replace(result, samples_per_s=self._figure(result))

    def _is_sound(self, row: Row) -> bool:
        """Return whether `verify` does not reject it."""
        if row is self._stock or row.verified is not None:
            return True
        self._doing, self._running, self._planned = "verify", [row.name], 0
        self._show()
        began = time.monotonic()
        found = self._verify(row.configuration)
        self._verifying_s += (passed := time.monotonic() - began)
        self._began += passed  # verification does not take of the time of the search
        self._deadline += passed
        self._running = []
        stock = self._stock
        has_losses = stock is not None and stock.result is not None and stock.result.losses
        row.verified = found.text if has_losses else f"{found.text}; no losses to compare"
        if found.rejects:
            row.why = f"rejected by verify: {found.text}"
        self._show()
        return not found.rejects

    def _reject_wrong_losses(self, row: Row) -> None:
        """Reject a row whose losses are not those of the stock run, by the trials that recorded most of them."""
        if row is self._stock or self._stock is None or row.result is None or not row.has_worked:
            return
        if self._stock.result is None:
            return
        if [*row.result.schedules] != [*self._stock.result.schedules] and self._stock.has_worked:
            row.why = "rejected: its scheduler would change the learning rates after another number of steps"
            return
        found, stock = (
            max((each for each in (of.result, *of.finals) if each is not None), key=lambda each: len(each.losses))
            for of in (row, self._stock)
        )
        if (fault := loss_fault(found, stock)) is not None:
            row.why = f"rejected: {fault}"

    # The outcome

    def _outcome(self, best: Row | None, *, is_complete: bool) -> Outcome:
        gain = None
        if best is not None and best is not self._stock and self._stock is not None and self.score(self._stock):
            finalists = [row for row in self.rows if row.has_worked and row.finals]
            if best in finalists and self._stock in finalists:
                gain = self._known(finalists, rounds_are_over=True).gain(best.name, self._stock.name)
            else:
                found, stock = (self._scored(row.result) for row in (best, self._stock) if row.result is not None)
                gain = Gain(value=found.samples_per_s / stock.samples_per_s - 1)
        gains = {}
        if best is not None and best.choice is not None:
            for axis, _, _ in self._space.parts(best.choice):
                if (value := self._gain_of(axis, best.choice)) is not None:
                    gains[axis] = value
        return Outcome(rows=self.rows, best=best, gain=gain, gains=gains, is_complete=is_complete)

    def _gain_of(self, axis: str, choice: Choice) -> float | None:
        """Return the gain of a setting over the stock one, from the measured pair that is most like ``choice``."""
        pairs: list[tuple[int, float]] = []
        for row in self._by_choice.values():
            if row.choice is None or row.choice[axis] != choice[axis] or not row.has_worked:
                continue
            other = self._by_choice.get(_key({**row.choice, axis: self._space.stock[axis]}))
            if other is not None and other.has_worked and self.score(other):
                alike = sum(row.choice[name] == setting for name, setting in choice.items())
                pairs.append((alike, self.score(row) / self.score(other) - 1))
        return max(pairs)[1] if pairs else None


def _key(choice: Choice) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(choice.items()))
