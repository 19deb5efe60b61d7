"""``python -m lightning_ups compare``: what differed between runs, and what effect it had, significant or noise."""

import argparse
import json
import os
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from lightning_ups.config.suggestions import parse_options
from lightning_ups.insight.compare import (
    MEAN_STEP,
    STEP,
    Effect,
    RunLog,
    Side,
    different_settings,
    effects,
    interval,
    kind_of_times,
    of_matched_steps,
    percent,
    read_run,
)
from lightning_ups.insight.report import Chart, Content, History, page

_Sides = Sequence[Side]
_Settings = Mapping[str, Sequence[Any]]  # by name, one value for each side
_Found = Mapping[str, Sequence[Effect]]  # by the name of the side

_MOST = 40  # settings on a screen; the JSON file has all
_LONGEST = 60  # characters of a setting
_WIDEST = 30  # characters of the head of a column
_NUMBERS = ("difference", "99 % interval", "verdict")
_STYLES = {"significant": "bold yellow", "beyond batch noise": "yellow", "not finite": "bold red"}
_ALONE = "One run per side: the noise between runs or seeds is not known. Give several: compare A0 A1 A2 vs B0 B1 B2."
_FEW = "not tested: fewer than 8 values in common, too few for an interval. Log more often, or run more steps."


def main(argv: Sequence[str]) -> int:
    """Print the comparison, and return 0."""
    asked = parse_options(_parser(), argv)
    sides = sides_of(asked)
    if len(sides) < 2:
        raise ValueError("compare takes at least two runs, such as lightning_logs/version_0 lightning_logs/version_1.")
    base = sides[0]
    settings = different_settings(sides)
    found = {new.name: effects(base, new, warmup=asked.warmup) for new in sides[1:]}
    notes = [*_notes(sides, found)]
    _print(sides, settings, found, notes)
    if asked.json:
        write_json(
            asked.json,
            {
                "base": base.name,
                "runs": {side.name: [run.name for run in side.runs] for side in sides},
                "settings": settings,
                "effects": {name: [asdict(each) for each in of] for name, of in found.items()},
                "notes": notes,
            },
        )
    if asked.html:
        _write(asked.html, page(_content(sides, settings, found, notes)))
    return 0


def add_runs(parser: argparse.ArgumentParser) -> None:
    """Add the runs, and the options of reading them."""
    parser.add_argument(
        "runs",
        metavar="RUN",
        nargs="+",
        help="a folder with logs, a CSV or JSON export, TensorBoard events or a .wandb file; the first is compared"
        " with; `A0 A1 vs B0 B1` compares groups of runs",
    )
    parser.add_argument("--warmup", type=int, metavar="STEPS", help="first steps that are not timed; default a tenth")
    parser.add_argument("--time", metavar="NAME", help="the column with the seconds of a step, or with a clock")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")


def sides_of(asked: argparse.Namespace) -> list[Side]:
    """Return the sides: the groups between the words ``vs``, or else each run."""
    groups: list[list[str]] = [[]]
    for word in asked.runs:
        if word == "vs":
            groups.append([])
        else:
            groups[-1].append(word)
    if not all(groups):
        raise ValueError("'vs' stands between runs: A0 A1 vs B0 B1.")
    groups = groups if len(groups) > 1 else [[word] for word in groups[0]]
    paths = [os.path.abspath(group[0]) for group in groups]
    shared = os.path.commonpath([os.path.dirname(path) for path in paths])
    if twice := next((path for path in paths if paths.count(path) > 1), None):
        raise ValueError(f"{os.path.relpath(twice, shared)} is given twice. Name each run once.")
    runs = [[read_run(each, time=asked.time) for each in group] for group in groups]
    _check_kinds([run for of in runs for run in of])
    titles = [of[0].title for of in runs]
    if not all(titles) or len({*titles}) < len(titles):
        titles = [os.path.relpath(path, shared) for path in paths]
    return [
        Side(title + (f" and {len(of) - 1} more" if of[1:] else ""), of) for title, of in zip(titles, runs, strict=True)
    ]


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write ``content`` to ``path``; numbers that are not finite become null."""
    _write(path, json.dumps(_finite(content), indent=2, default=str) + "\n")


def _check_kinds(runs: Sequence[RunLog]) -> None:
    kinds = {run.name: kind for run in runs if (kind := run.manifest.get("run", {}).get("kind"))}
    first, kind = next(iter(kinds.items()), ("", ""))
    if other := next((name for name in kinds if kinds[name] != kind), None):
        raise ValueError(f"{other} is a run of `{kinds[other]}`, but {first} of `{kind}`. Give runs of one kind.")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lightning_ups compare",
        description="Compare runs: what differed, what effect it had, and whether that is more than noise.",
    )
    add_runs(parser)
    parser.add_argument("--html", type=Path, metavar="FILE", help="write one HTML page with charts")
    return parser


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}. Name a file in a folder that exists.") from None


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def _notes(sides: _Sides, found: _Found) -> Iterator[str]:
    runs = [run for side in sides for run in side.runs]
    every = [effect for of in found.values() for effect in of]
    pairs = [[side for side in (sides[0], new) if len(side.runs) == 1] for new in sides[1:]]
    if any(len(single) == 2 for single in pairs):
        yield _ALONE
    if name := next((single[0].name for single in pairs if len(single) == 1), None):
        yield f"{name} is one run: the noise between runs is taken from the spread of the other side alone."
    if any(effect.verdict == "not tested" and effect.points for effect in every):
        yield _FEW
    if apart := dict.fromkeys(effect.name for effect in every if effect.note == "no step in common"):
        yield f"No step in common: {_some(apart)}. Compare runs that log this at the same steps."
    if not all(any(effect.name not in (STEP, MEAN_STEP) for effect in of) for of in found.values()):
        yield f"No metric in common: {', '.join(f'{run.name} has {_some(run.series)}' for run in runs)}."
    if not all(of and of[0].name == STEP for of in found.values()):
        missing = next((run.name for run in runs if not run.times), None)
        why = f"{missing} has none" if missing else "the runs have them from different sources"
        yield f"Step times are not compared: {why}. TokenThroughput() writes them; --time NAME names a logged column."
    with_manifest, without = ([run.name for run in runs if bool(run.manifest) is has] for has in (True, False))
    if missing := next((run.name for run in runs if not run.settings), None):
        yield f"Settings are not compared: {missing} has no manifest.json, hparams.yaml or config.yaml."
    elif with_manifest and without:
        yield f"Settings are not compared: {with_manifest[0]} has a manifest.json, {without[0]} has not."
    if len({str(run.manifest.get("batch", {}).get("size")) for run in runs if run.manifest}) > 1:
        yield "The batches differ in size: compare rates (per_s), not step times."
    yield from (note for run in runs for note in run.notes)


def _some(names: Iterable[str]) -> str:
    names = [*names]
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if names[4:] else "") if names else "none"


def _print(sides: _Sides, settings: _Settings, found: _Found, notes: Sequence[str]) -> None:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 1000)  # no line of a pipe is wrapped
    rows = [(name, *map(_short, values)) for name, values in settings.items()]
    heads = _heads([side.name for side in sides])
    _print_table(console, "What differed", ("setting", *heads.values()), rows[:_MOST])
    if len(rows) > _MOST or not rows:
        console.print(
            f"  and {len(rows) - _MOST} more: --json FILE lists all" if rows else "  no stored setting differs"
        )
    for name, of in found.items():
        head = ("", heads[sides[0].name], heads[name], *_NUMBERS, "")
        _print_table(console, f"Effect of {name} against {sides[0].name}", head, [_row(effect) for effect in of])
    for name, head in heads.items():
        if head != name:
            console.print(f"\n{head} is {name}", markup=False)
    for note in notes:
        console.print(f"\n{textwrap.fill(note, console.width)}", markup=False)


def _heads(names: Sequence[str]) -> dict[str, str]:
    """Return the head of each side's column: the end of its name if it is long and no other ends alike."""
    heads = {name: name if len(name) <= _WIDEST else f"…{name[1 - _WIDEST :]}" for name in names}
    return heads if len({*heads.values()}) == len(heads) else {name: name for name in names}


def _print_table(console: Console, title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    console.print(f"\n{title}", style="bold", markup=False)
    columns = (Column(escape(cell), overflow="fold", no_wrap=cell in _NUMBERS) for cell in head)
    table = Table(*columns, box=None, header_style="dim", padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*map(escape, row), style=next((_STYLES[cell] for cell in row if cell in _STYLES), None))
    if rows:
        console.print(table)


def _row(effect: Effect) -> tuple[str, ...]:
    shown = [_value(effect, value) for value in (effect.base, effect.new)]
    found = effect.difference
    as_text = (lambda each: percent(each, sign=True)) if effect.relative else (lambda each: f"{each:+.3g}")
    ends = interval(found, relative=effect.relative) if isfinite(found.low) else "-"
    note = "; ".join(filter(None, (effect.note, of_matched_steps(effect))))
    return (effect.name, *shown, as_text(found.value), ends, effect.verdict, note)


def _value(effect: Effect, value: float) -> str:
    if effect.name in (STEP, MEAN_STEP):
        return f"{value:.4g} s" if value >= 1 else f"{1e3 * value:.4g} ms"
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _content(sides: _Sides, settings: _Settings, found: _Found, notes: Sequence[str]) -> Content:
    names = [side.name for side in sides]
    figures = [(f"{effect.name}, {name}", "  ".join(_row(effect)[1:])) for name, of in found.items() for effect in of]
    return Content(
        title=f"{' and '.join(names[1:])} against {names[0]}",
        subtitle=" ".join(notes),
        figures=figures,
        charts=[*_charts(sides, found)],
        manifest={name: dict(zip(names, values, strict=True)) for name, values in settings.items()},
    )


def _charts(sides: _Sides, found: _Found) -> Iterator[Chart]:
    """Yield a chart for each effect, with a line for each run, thinned out."""
    runs, kind = [run for side in sides for run in side.runs], kind_of_times(sides) or ""
    for name in dict.fromkeys(effect.name for of in found.values() for effect in of if effect.name != MEAN_STEP):
        history = History()
        for run in runs:
            series = run.times.get(kind) if name == STEP else run.series.get(name)
            for step, value in zip(series.steps, series.values, strict=True) if series else ():
                history.add({run.name: float(value)}, int(step))
        yield Chart(title=f"{name}, s" if name == STEP else name, section="Curves", series=history.series)
