"""``tune``: find the fastest settings of a run that fit in memory and train the same."""

import json
import logging
import os
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from rich.live import Live
from rich.table import Table

from lightning_ups._compat.contexts import only_from
from lightning_ups._compat.optional.packages import has
from lightning_ups.commands.base_run import (
    BaseRun,
    Parse,
    accelerator_of_preset,
    add_common_options,
    base_of,
    store_of,
    write_new,
)
from lightning_ups.commands.plan import planner_of, this_device
from lightning_ups.config.output import note, shell_word, short_path
from lightning_ups.insight.memory import GIB, Uncountable
from lightning_ups.insight.tune import (
    Choice,
    Configuration,
    Engine,
    Outcome,
    Result,
    Row,
    Search,
    Situation,
    Space,
    Spot,
    Store,
    Verification,
    digest,
    frontier,
    gib,
    html_page,
    merged,
    table,
    text_of,
)
from lightning_ups.order import refusals

OPTIONS = ("devices", "fresh", "keep_global_batch", "limit", "minutes", "objective", "output", "seconds", "store")
_HEAD = ("configuration", "samples/s", "step", "memory", "MFU", "")
_VERIFY = (sys.executable, "-m", "lightning_ups", "verify", "--no_faults")
_MOST_SHOWN = 12  # rows of the live table


def own_options(argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the options of ``tune``, and the words that are options of fit."""
    parser = ArgumentParser(
        prog="python -m lightning_ups tune",
        description="Find the fastest settings of a run that fit in memory and train the same.",
        epilog="All options of fit are taken as well, such as --config run.yaml. What your files set stays as it is.",
        allow_abbrev=False,
    )
    parser.add_argument("--minutes", type=float, default=20, help="of searching; 20")
    parser.add_argument("--devices", type=int, metavar="N", help="GPUs that trials may use; those of the run")
    parser.add_argument("--objective", choices=("throughput", "memory", "cost"), default="throughput")
    parser.add_argument(
        "--keep_global_batch",
        "--keep-global-batch",
        action="store_true",
        help="trade a given batch size for accumulation; the samples of an optimizer step stay the same",
    )
    add_common_options(parser, seconds=10, output="tuned")
    own, rest = parser.parse_known_args(argv)
    return vars(own), rest


def search(
    parse: Parse,
    words: Sequence[str],
    *,
    minutes: float,
    devices: int | None,
    objective: Any,
    keep_global_batch: bool,
    seconds: float,
    limit: float,
    output: Path,
    store: Path | None,
    fresh: bool,
) -> int:
    """Search, print the table and write the files. Return 0, or 1 if no configuration works."""
    deadline = time.monotonic() + 60 * minutes
    base = base_of(parse, words)
    names, per_trial = base.devices(devices)
    facts = _situation(base, most=max(len(names), 1), objective=objective, keeps_global_batch=keep_global_batch)
    space = Space(facts)
    note(f"tune: {len(space.settings)} axes, {space.size:,} choices: {', '.join(space.settings) or 'none'}")
    if space.fixed:
        note(f"tune: fixed by your settings: {', '.join(space.fixed)}")
    accelerator = accelerator_of_preset(base)

    def configuration(choice: Choice) -> Configuration:
        tree = merged([accelerator, space.tree(choice)])
        return base.configuration(*([text_of(tree)] if tree else []), preset=None)

    kept = store_of(store, fresh=fresh)
    per_trial = len(names) if objective == "cost" and names else per_trial
    with (
        Engine(store=kept, identity=base.identity, devices=names, per_trial=per_trial) as engine,
        _shown(minutes) as show,
    ):
        found = Search(
            engine,
            space,
            configuration=configuration,
            admit=lambda each: _refused(parse, each),
            verify=lambda each: _verified(engine, kept, base, each, limit=limit),
            objective=objective,
            seconds=seconds,
            limit=limit,
            deadline=deadline,
            show=show,
        ).run(_given(base, configuration(space.stock)))
    return _conclude(found, space, base, output)


def _given(base: BaseRun, stock: Configuration) -> list[Row]:
    rows = [Row(name="stock Lightning", choice=None, configuration=stock)]
    if base.preset is not None:
        configured = base.configuration(preset=base.preset)
        rows.append(Row(name=f"preset {base.preset}", choice=None, configuration=configured))
    return rows


def _situation(base: BaseRun, *, most: int, objective: Any, keeps_global_batch: bool) -> Situation:
    run, config = base.requested.run, base.requested.config
    on_gpu = run.accelerator == "cuda" and torch.cuda.is_available()
    data = config.get("data") or {}
    return Situation(
        on_gpu=on_gpu,
        capability=torch.cuda.get_device_capability() if on_gpu else (0, 0),
        devices=run.num_devices,
        most_devices=max(most, run.num_devices),
        explicit=base.explicit,
        sets_precision=base.sets_precision,
        data=dict(data.get("init_args") or {}),
        optimizer=base.requested.optimizer,
        accumulated=int(config["trainer"].get("accumulate_grad_batches") or 1),
        objective=objective,
        keeps_global_batch=keeps_global_batch,
        cores=max(1, len(os.sched_getaffinity(0)) // max(1, run.num_devices)),
        has_torchao=has("torchao"),
    )


def _refused(parse: Parse, configuration: Configuration) -> str | None:
    """Return why a configuration cannot work, or does not fit, or None; nothing is run."""
    try:
        with redirect_stderr(StringIO()), only_from(logging.ERROR, "lightning"):  # notes of each of many runs
            requested = parse(configuration.all_words)
    except (ValueError, RuntimeError, TypeError) as error:
        return f"refused: {error}"
    if found := next(iter(refusals(requested.run)), None):
        return f"refused: {found.text(requested.run)}"
    if requested.run.accelerator != "cuda" or (device := this_device()) is None:
        return None
    try:
        planner, _ = planner_of(requested, device=device, prepares_data=False)
        size = planner.moment(planner.declared).total
    except (Uncountable, ValueError, RuntimeError):
        return None  # it is tried
    usable = planner.usable or 0
    # A plan may be a few percent too high: what is near the limit is tried.
    return None if size <= 1.1 * usable else f"does not fit: plan counts {gib(size)} of {gib(usable)}"


def _verified(
    engine: Engine, store: Store | None, base: BaseRun, configuration: Configuration, *, limit: float
) -> Verification:
    words = configuration.all_words
    key = digest(["verify", words, base.identity])
    found = store.find(key, limit=limit) if store is not None else None
    if found is None:
        code, output = engine.call([*_VERIFY, *words], limit=2 * limit)
        lines = [line for line in output.splitlines() if line.strip()]
        text = lines[-1] if lines else ""
        if code == 0:
            found = Result(text="passed")
        elif code == 1 and "Traceback (most recent call last)" not in output:
            found = Result(failure="refused", text=text)
        else:
            why = "it did not end" if code is None else text
            found = Result(text=f"not verified: {why}"[:200])
        if store is not None:
            store.add(key, found, limit=limit, about={"words": ["verify", *words], **base.identity})
    return Verification(rejects=found.failure is not None, text=found.text)


# What is shown and written


@contextmanager
def _shown(minutes: float) -> Iterator[Callable[[Sequence[Row]], None]]:
    """Show rows in a live table; as lines, each once, where the output is not a terminal."""
    console = Console(stderr=True)
    if console.is_terminal:
        with Live(console=console, transient=True) as live:
            yield lambda rows: live.update(_live_table(rows, minutes))
        return
    said: dict[int, str] = {}

    def show(rows: Sequence[Row]) -> None:
        for row in rows:
            line = "  ".join(cell for cell in _cells(row) if cell)
            if (row.result is not None or row.why) and said.get(id(row)) != line:
                said[id(row)] = line
                note(f"tune: {line}")

    yield show


def _live_table(rows: Sequence[Row], minutes: float) -> Table:
    shown = Table(*_HEAD, title=f"tune, {minutes:g} minutes; Ctrl-C ends it with the best so far")
    for row in _ranked(rows)[:_MOST_SHOWN]:
        shown.add_row(*_cells(row))
    return shown


def _ranked(rows: Sequence[Row]) -> list[Row]:
    tried = [row for row in rows if row.result is not None or row.why]
    return sorted(tried, key=lambda row: -row.result.samples_per_s if row.result and row.has_worked else 1)


def _cells(row: Row) -> list[str]:
    result = row.result
    said = row.why or ("" if row.verified is None else f"verify: {row.verified}")
    if result is None or result.failure is not None:
        text = said or (result.failure_line if result else "")
        return [row.name, "", "", "", "", text[:100]]
    finals = [each.samples_per_s for each in row.finals]
    rate = sum(finals) / len(finals) if finals else result.samples_per_s
    return [
        row.name,
        f"{rate:.4g}",
        f"{1e3 * result.step_s:.4g} ms",
        gib(result.peak_bytes),
        "" if result.mfu is None else f"{result.mfu:.1%}",
        (said or ("ended early" if result.is_pruned else f"{len(finals)} rounds" if finals else ""))[:100],
    ]


def _conclude(found: Outcome, space: Space, base: BaseRun, output: Path) -> int:
    ranked = _ranked(found.rows)
    cells = [_HEAD, *map(_cells, ranked)]
    widths = [min(70, max(len(row[column]) for row in cells)) for column in range(len(_HEAD))]
    for row in cells:
        print("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    print()
    best = found.best
    if best is None:
        print("No configuration was measured and passed. The table says why.")
        return 1
    if not found.is_complete:
        print("Interrupted: the best so far was not verified. The same command continues.")
    is_stock = space.is_stock(best.choice)
    gain = None if is_stock else found.gain
    said = ": no setting was better beyond doubt" if is_stock else f": {gain} over stock Lightning"
    print(f"best        {best.name}{said if is_stock or gain is not None else ''}")
    chart = frontier(
        [
            Spot(name=row.name, rate=row.result.samples_per_s, gib=row.result.peak_bytes / GIB, is_chosen=row is best)
            for row in found.rows
            if row.result is not None and row.has_worked
        ],
        label="samples per second and peak memory",
    )
    title = f"{type(base.requested.run.module).__name__}: the search for faster settings"
    tiles = [("best", best.name), *([("gain over stock", str(gain))] if gain is not None else [])]
    sections = [("Speed and memory", chart), ("Configurations", table(_HEAD, [*map(_cells, ranked)]))]
    device = best.result.device if best.result is not None else ""
    paths = [
        write_new(output, ".yaml", "\n".join(_overlay(found, best, space, base)) + "\n"),
        write_new(output, ".html", html_page(title, f"{device}, {len(ranked)} rows", tiles=tiles, sections=sections)),
        write_new(output, ".json", json.dumps(_facts(found), indent=1) + "\n"),
    ]
    print(f"written     {', '.join(map(short_path, paths))}")
    words = " ".join(map(shell_word, base.words))
    if not is_stock or base.preset is not None:
        print(f"try next    python -m lightning_ups fit {words} --config {shell_word(paths[0])}")
    return 0


def _overlay(found: Outcome, best: Row, space: Space, base: BaseRun) -> Iterator[str]:
    """Yield the lines of ``tuned.yaml``: each setting with its gain as a comment."""
    over = "" if found.gain is None or space.is_stock(best.choice) else f", {found.gain} over stock Lightning"
    yield f"# Found by tune on {best.result.device if best.result is not None else 'this machine'}{over}."
    yield f"# verify: {best.verified or 'not asked'}."
    if best.choice is None:
        yield f"preset: {base.preset}  # no setting of the search was better"
        return
    parts = {axis: (name, tree) for axis, name, tree in space.parts(best.choice)}
    if parts or base.preset is not None:
        yield f"preset: none  # {'the lines below replace it' if parts else 'stock Lightning is as fast'}"
    else:
        yield "# No setting of the search was better beyond doubt."
    comments: dict[str, str] = {}
    for axis, (name, tree) in parts.items():
        gain = found.gains.get(axis)
        said = "not measured alone" if gain is None else f"{gain:+.1%}"
        comments |= dict.fromkeys(map(str.strip, _last_lines(tree)), f"{axis}: {name}, {said}")
    tree = merged([accelerator_of_preset(base), space.tree(best.choice)])
    for line in text_of(tree).splitlines():
        comment = comments.pop(line.strip().removeprefix("- "), None)
        yield f"{line}  # {comment}" if comment else line


def _last_lines(tree: Any) -> list[str]:
    """Return the line of a fragment to which its comment belongs: its class, or its last setting."""
    lines = yaml.safe_load(yaml.safe_dump(tree)) and text_of(tree).splitlines()
    named = [line.strip().removeprefix("- ") for line in lines if "class_path" in line]
    return named[:1] or [lines[-1]]


def _facts(found: Outcome) -> dict[str, Any]:
    gain = found.gain and {"value": found.gain.value, "low": found.gain.low, "high": found.gain.high}
    return {
        "best": found.best and found.best.name,
        "gain_over_stock": gain,
        "is_complete": found.is_complete,
        "rows": [
            {
                "name": row.name,
                "choice": row.choice,
                "result": row.result and row.result.as_dict(),
                "finals": [each.samples_per_s for each in row.finals],
                "why": row.why,
                "verified": row.verified,
            }
            for row in found.rows
        ],
    }
