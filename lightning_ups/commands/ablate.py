"""``ablate``: what each addition to a run gains, on a ladder from the plain run and left out of the full one."""

import json
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from lightning_ups.commands.base_run import (
    BaseRun,
    Parse,
    Part,
    accelerator_of_preset,
    add_common_options,
    base_of,
    parsed,
    parts_of_preset,
    store_of,
    undisturbed,
    write_new,
)
from lightning_ups.config.layers import read
from lightning_ups.config.output import clock, note, short_path
from lightning_ups.insight.tune import (
    Configuration,
    Effort,
    Engine,
    Gain,
    Result,
    Rounds,
    appending,
    bars,
    gib,
    html_page,
    loss_difference,
    loss_fault,
    merged,
    rate_bar,
    table,
    text_of,
)

OPTIONS = ("fresh", "limit", "output", "rounds", "seconds", "store", "with")  # as typed
_HEAD = ("", "samples/s", "gain [95 %]", "memory", "MFU", "start", "loss", "")

Names = tuple[str, ...]


def own_options(argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the options of ``ablate``, and the words that are options of fit."""
    parser = ArgumentParser(
        prog="python -m lightning_ups ablate",
        description="Measure what each addition gains: a ladder from the plain run, and leave-one-out.",
        epilog="All options of fit are taken as well, such as --config run.yaml. Without --with, the parts of the"
        " preset are the additions, and the plain run is stock Lightning.",
        allow_abbrev=False,
    )
    parser.add_argument("--with", dest="files", metavar="FILE", action="append", default=[], help="one addition")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each configuration; 3")
    add_common_options(parser, seconds=10, output="ablate")
    return parsed(parser, argv)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A configuration of the ladder, or one with an addition left out."""

    name: str
    gain: Gain | None  # over the rung below; for one that is left out, of the full configuration over it
    result: Result  # the first one
    rate: float  # the geometric mean of all rounds, as the gain compares them
    loss: float | None  # relative to the plain run
    verdict: str = ""


def search(
    parse: Parse,
    words: Sequence[str],
    *,
    files: Sequence[str],
    rounds: int,
    seconds: float,
    limit: float,
    output: Path,
    store: Path | None,
    fresh: bool,
) -> int:
    """Measure, print and write the ladder. Return 0."""
    base = base_of(parse, words)
    parts = [_part(file) for file in files] or [*parts_of_preset(base)]
    if not parts:
        raise ValueError("There is nothing to add: the run has no preset. Give --with A.yaml, or --preset auto.")
    devices, per_trial = base.devices(None)
    devices = undisturbed(devices, per_trial, workers=base.workers)
    with Engine(
        store=store_of(store, fresh=fresh), identity=base.identity, devices=devices, per_trial=per_trial
    ) as engine:
        ladder = _Ladder(engine, base, parts, is_stock=not files, effort={"seconds": seconds, "limit": limit})
        rungs, left_out = ladder.measure(rounds)
    title = f"{type(base.requested.run.module).__name__}: what each addition gains"
    plain = "stock Lightning" if not files else "the run without additions"
    subtitle = f"{rungs[0].result.device or 'no device'}, {rounds} rounds, {plain} first, samples per second"
    print(*_lines(rungs, left_out), sep="\n")
    facts = {"plain": plain, "rounds": rounds, "ladder": [*map(_facts, rungs)], "left_out": [*map(_facts, left_out)]}
    paths = [
        write_new(output, ".html", _page(title, subtitle, rungs, left_out)),
        write_new(output, ".json", json.dumps(facts, indent=1) + "\n"),
    ]
    print("", f"written     {', '.join(map(short_path, paths))}", sep="\n")
    return 0


def _part(file: str) -> Part:
    return Part(name=Path(file).stem, tree=appending(read(file, command="fit").tree))


class _Ladder:
    """Measures a run with sets of its additions."""

    def __init__(
        self, engine: Engine, base: BaseRun, parts: Sequence[Part], *, is_stock: bool, effort: Mapping[str, float]
    ) -> None:
        self._engine, self._base, self._effort, self._is_stock = engine, base, effort, is_stock
        self._trees = {part.name: part.tree for part in parts}
        if len(self._trees) < len(parts):
            raise ValueError("Two files of --with have one name, by which the table would call both. Rename one.")
        self._results: dict[Names, list[Result]] = {}
        self._durations: list[float] = []
        self._total = 0  # trials, if none fails

    def measure(self, rounds: int) -> tuple[list[Row], list[Row]]:
        """Return the rungs of the ladder, and the full configuration without each addition."""
        plain, full = (), tuple(self._trees)
        singles = [(name,) for name in self._trees]
        _, _, wanted = self._ladder([*self._trees])  # in another order there are as many
        self._total = len({plain, *singles, *wanted}) + (rounds - 1) * len(wanted)
        note(f"ablate: {self._total} trials in {rounds} round{'' if rounds == 1 else 's'}")
        self._round([plain, *singles], number=0)
        if (failed := self._failure(plain)) is not None:
            raise ValueError(f"The run without additions cannot be measured ({failed.failure}): {failed.text}")
        order = sorted(self._trees, key=lambda name: -self._rate((name,)))
        rungs, without, wanted = self._ladder(order)
        for number in range(rounds):
            try:
                self._round([names for names in wanted if self._failure(names) is None], number=number)
            except KeyboardInterrupt:
                if not number:  # some configurations were not measured; the store keeps the others
                    raise
                note(f"ablate: interrupted in round {number + 1} of {rounds}; the same command continues")
                break
        known = Rounds({_key(names): self._results[names] for names in wanted if self._failure(names) is None})

        def gain(of: Names, over: Names) -> Gain | None:
            both = [self._sorted(names) for names in (of, over)]
            if any(self._failure(names) is not None for names in both):
                return None
            return known.gain(_key(both[0]), _key(both[1]))

        left_out = [
            self._row(f"without {name}", without[name], gain(full, without[name]), verdict_of=full) for name in order
        ]
        ladder = [self._row("stock Lightning" if self._is_stock else "as configured", plain, None)]
        ladder += [
            self._row(f"+ {rung[-1]}", rung, gain(rung, below), verdict_of=rung) for below, rung in pairwise(rungs)
        ]
        return ladder, left_out

    def _ladder(self, order: Sequence[str]) -> tuple[list[Names], dict[str, Names], list[Names]]:
        """Return the rungs, the full configuration without each part, and the different ones of both."""
        rungs = [tuple(order[:count]) for count in range(len(order) + 1)]
        without = {name: tuple(each for each in order if each != name) for name in order}
        return rungs, without, [*dict.fromkeys(self._sorted(names) for names in (*rungs, *without.values()))]

    def _round(self, wanted: Sequence[Names], *, number: int) -> None:
        # One after another in each round, so that drift of the machine meets all configurations alike. Those of one
        # round run at once where there are several devices.
        effort = Effort(round=number, **self._effort)  # type: ignore[arg-type]
        missing = [names for names in map(self._sorted, wanted) if len(self._results.get(names, ())) <= number]
        futures = [(names, self._engine.start(self._configuration(names), effort)) for names in missing]
        for names, future in futures:
            found = future.result()
            self._results.setdefault(names, []).append(found)
            self._durations.append(found.wall_s)
            shown = f"{found.samples_per_s:.4g} samples/s" if found.failure is None else _short(found)
            note(f"ablate: round {number + 1}: {_key(names)}: {shown} ({self._progress})")

    @property
    def _progress(self) -> str:
        done = len(self._durations)
        left = ceil(max(0, self._total - done) / self._engine.parallel) * sum(self._durations) / done
        return f"{done} of {self._total} trials, about {clock(left)} left"

    def _row(self, name: str, names: Names, gain: Gain | None, *, verdict_of: Names | None = None) -> Row:
        names = self._sorted(names)
        results, plain = self._results[names], self._results[()][0]
        failed = self._failure(names)
        first = failed or results[0]
        row = Row(
            name=name,
            gain=gain,
            result=first,
            rate=0.0 if failed else geometric_mean(each.samples_per_s for each in results),
            loss=None if failed else loss_difference(first, plain),
        )
        if verdict_of is None:
            return row
        return replace(row, verdict=self._verdict(row, self._sorted(verdict_of)))

    def _verdict(self, row: Row, judged: Names) -> str:
        if (failed := self._failure(judged)) is not None:
            return f"harmful: {failed.failure}"
        if row.gain is None:
            return ""
        result, plain = self._results[judged][0], self._results[()][0]
        if loss_fault(result, plain) is not None:
            return f"{row.gain.verdict}; the loss differs"
        return row.gain.verdict

    def _configuration(self, names: Names) -> Configuration:
        if not self._is_stock:
            fragments = [text_of(self._trees[name]) for name in names]
            return self._base.configuration(*fragments, preset=self._base.preset)
        tree = merged([accelerator_of_preset(self._base), *(self._trees[name] for name in names)])
        return self._base.configuration(*([text_of(tree)] if tree else []), preset=None)

    def _sorted(self, names: Names) -> Names:
        return tuple(name for name in self._trees if name in names)

    def _failure(self, names: Names) -> Result | None:
        return next((each for each in self._results.get(names, ()) if each.failure is not None), None)

    def _rate(self, names: Names) -> float:
        return self._results[names][0].samples_per_s


def _key(names: Names) -> str:
    return " + ".join(names) or "plain"


def _short(result: Result) -> str:
    return result.failure_line[:110]


def _cells(row: Row) -> list[str]:
    result = row.result
    if result.failure is not None:
        return [row.name, "-", _short(result), "", "", "", "", row.verdict]
    return [
        row.name,
        f"{row.rate:.4g}",
        "" if row.gain is None else str(row.gain),
        gib(result.peak_bytes),
        "-" if result.mfu is None else f"{result.mfu:.1%}",
        f"{result.start_s:.1f} s",
        "-" if row.loss is None else f"{row.loss:+.2%}",
        row.verdict,
    ]


def _lines(rungs: Sequence[Row], left_out: Sequence[Row]) -> Iterator[str]:
    ladder, without = ([_cells(row) for row in rows] for rows in (rungs, left_out))
    shown = [_HEAD, *ladder, *without]
    widths = [max(len(row[column]) for row in shown if row[1] != "-") for column in range(len(_HEAD))]
    widths[0] = max(len(row[0]) for row in shown)
    for index, row in enumerate(shown):
        if index == 1 + len(ladder):
            yield "left out of the full configuration; the gain and the verdict are those of the addition:"
        if row[1] == "-":
            yield f"{row[0]:{widths[0]}}  {row[2]}"
            continue
        yield "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()


def _facts(row: Row) -> dict[str, Any]:
    gain = row.gain and row.gain.as_dict()
    facts = {"name": row.name, "samples_per_s": row.rate, "gain": gain, "loss_difference": row.loss}
    return {**facts, "verdict": row.verdict, "result": row.result.as_dict()}


def _page(title: str, subtitle: str, rungs: Sequence[Row], left_out: Sequence[Row]) -> str:
    first, best = rungs[0].rate, max(row.rate for row in rungs)
    steps = [
        rate_bar(row.name, row.rate, row.gain, reference=below.rate, verdict=row.verdict)
        for below, row in pairwise([rungs[0], *rungs])
    ]
    tiles = [(rungs[0].name, f"{first:.4g}/s"), ("fastest rung", f"{best:.4g}/s"), ("gain", f"{best / first - 1:+.1%}")]
    return html_page(
        title,
        subtitle,
        tiles=tiles,
        sections=[
            ("The ladder: one addition at a time, in the order of gain", bars(steps, label="samples per second")),
            ("", table(_HEAD, [*map(_cells, rungs)])),
            ("Left out of the full configuration", table(_HEAD, [*map(_cells, left_out)])),
        ],
    )
