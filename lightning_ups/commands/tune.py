"""``tune``: find the fastest settings of a run that fit in memory and train the same."""

import json
import logging
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from pathlib import Path
from statistics import geometric_mean
from threading import Event, Thread
from typing import Any

import torch
import yaml
from rich.console import Console
from rich.live import Live
from rich.table import Table

from lightning_ups._compat.contexts import only_from
from lightning_ups._compat.environment import usable_cores
from lightning_ups._compat.optional.packages import has
from lightning_ups.commands.base_run import (
    BaseRun,
    Parse,
    accelerator_of_preset,
    add_common_options,
    base_of,
    parsed,
    store_of,
    undisturbed,
    write_new,
)
from lightning_ups.commands.plan import planner_of, this_device
from lightning_ups.config.output import clock, note, shell_word, short_path
from lightning_ups.insight.memory import GIB
from lightning_ups.insight.tune import (
    Choice,
    Configuration,
    Engine,
    Objective,
    Outcome,
    Progress,
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
_REMINDS_EVERY = 60  # seconds without a terminal


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
    return parsed(parser, argv)


def search(
    parse: Parse,
    words: Sequence[str],
    *,
    minutes: float,
    devices: int | None,
    objective: Objective,
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
    most = max(len(names), 1)
    per_trial = most if objective == "cost" else per_trial
    names = undisturbed(names, per_trial, workers=base.workers)
    facts = _situation(base, most=most, objective=objective, keeps_global_batch=keep_global_batch)
    space = Space(facts)
    if space.settings:
        note(f"tune: {space.size:,} choices of {', '.join(space.settings)}")
    else:
        note("tune: no axis to search on this device")
    if space.fixed:
        note(f"tune: fixed by your settings: {', '.join(space.fixed)}")
    if facts.typed_counts and type(facts.data.get("batch_size")) is int:
        options = ", ".join(f"--{key}" for key in facts.typed_counts)
        note(f"tune: the microbatch stays, since no file can replace options: {options}. Move them into a file.")
    accelerator = accelerator_of_preset(base)

    def configuration(choice: Choice) -> Configuration:
        tree = merged([accelerator, space.tree(choice)])
        return base.configuration(*([text_of(tree)] if tree else []), preset=None)

    given = _given(base, configuration(space.stock))
    kept = store_of(store, fresh=fresh)
    with (
        Engine(store=kept, identity=base.identity, devices=names, per_trial=per_trial) as engine,
        _shown() as show,
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
        ).run(given)
    return _conclude(found, space, base, output, objective=objective)


def _given(base: BaseRun, stock: Configuration) -> list[Row]:
    name = "stock Lightning"
    if parts := base.own_parts:
        name = "your settings"
        note(f"tune: your settings{' without the preset' if base.preset else ''} have {', '.join(parts)}, and stay")
    rows = [Row(name=name, choice=None, configuration=stock)]
    if base.preset is not None:
        configured = base.configuration(preset=base.preset)
        rows.append(Row(name=f"preset {base.preset}", choice=None, configuration=configured))
    return rows


def _situation(base: BaseRun, *, most: int, objective: Objective, keeps_global_batch: bool) -> Situation:
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
        trainer=config["trainer"],
        typed=base.typed,
        optimizer=base.requested.optimizer,
        accumulated=int(config["trainer"].get("accumulate_grad_batches") or 1),
        objective=objective,
        keeps_global_batch=keeps_global_batch,
        cores=max(1, usable_cores() // max(1, most)),
        has_torchao=has("torchao"),
    )


def _refused(parse: Parse, configuration: Configuration) -> str | None:
    """Return why a configuration cannot work, or does not fit, or None; nothing is run."""
    try:
        with redirect_stderr(StringIO()), only_from(logging.ERROR, "lightning"):  # notes of each of many runs
            requested = parse(configuration.all_words)
    except Exception as error:  # noqa: BLE001  (of the user's constructors too: it costs one row)
        return f"refused: {error}"
    if found := next(iter(refusals(requested.run)), None):
        return f"refused: {found.text(requested.run)}"
    if requested.run.accelerator != "cuda" or (device := this_device()) is None:
        return None
    try:
        planner, _ = planner_of(requested, device=device, prepares_data=False)
        size = planner.moment(planner.declared).total
    except Exception:  # noqa: BLE001  (fake tensors meet the user's code: it is tried)
        return None
    usable = planner.usable or 0
    # A plan may be a few percent too high: what is near the limit is tried.
    return None if size <= 1.1 * usable else f"does not fit: plan counts {gib(size)} of {gib(usable)}"


def _verified(
    engine: Engine, store: Store | None, base: BaseRun, configuration: Configuration, *, limit: float
) -> Verification:
    words = configuration.all_words
    key = digest(["verify", words, base.identity])
    found = store.find(key) if store is not None else None
    if found is None:
        code, output = engine.call([*_VERIFY, *words], limit=2 * limit)
        lines = [line for line in output.splitlines() if line.strip()]
        red = next((line for line in lines if line.startswith("RED: ")), None)
        if code == 0:
            on_one = any(line.startswith("compared on one device") for line in lines)
            found = Result(text="passed on one device" if on_one else "passed")
        elif code == 1 and red is not None:
            found = Result(failure="refused", text=red.removeprefix("RED: ").rstrip(":"))
        else:
            why = "it did not end" if code is None else lines[-1] if lines else f"exit code {code}"
            return Verification(rejects=False, text=f"not verified: {why}"[:200])  # the next search asks again
        if store is not None:
            store.add(key, found, about={"words": ["verify", *words], **base.identity})
    return Verification(rejects=found.failure is not None, text=found.text)


# What is shown and written


@contextmanager
def _shown() -> Iterator[Callable[[Progress], None]]:
    """Show the search in a live table; as lines where the output is not a terminal."""
    console, newest = Console(stderr=True), list[tuple[Progress, float]]()

    def show(progress: Progress) -> None:
        newest[:] = [(progress, time.monotonic())]

    if console.is_terminal:
        # Drawn again each second, so that the clock goes on during a trial.
        with Live(console=console, transient=True, refresh_per_second=1, get_renderable=lambda: _live_table(newest)):
            yield show
        return
    said: dict[int, str] = {}
    ends = Event()

    def tell(progress: Progress) -> None:
        show(progress)
        for row in progress.rows:
            line = "  ".join(cell for cell in _cells(row) if cell)
            if (row.result is not None or row.why) and said.get(id(row)) != line:
                said[id(row)] = line
                note(f"tune: [{clock(progress.passed_s)}] {line}")

    def remind() -> None:
        while not ends.wait(_REMINDS_EVERY):
            if newest and newest[0][0].running:
                note(f"tune: {_status(newest)}")

    reminder = Thread(target=remind, daemon=True)
    reminder.start()
    try:
        yield tell
    finally:
        ends.set()
        reminder.join()


def _live_table(newest: Sequence[tuple[Progress, float]]) -> Table:
    shown = Table(*_HEAD, title=f"tune: {_status(newest)}", caption="Ctrl-C ends it with the best so far")
    for row in _ranked(newest[0][0].rows)[:_MOST_SHOWN] if newest else ():
        shown.add_row(*_cells(row))
    return shown


def _status(newest: Sequence[tuple[Progress, float]]) -> str:
    """Return in one line what runs, since when, and how long the search may still take."""
    if not newest:
        return "starts"
    progress, began = newest[0]
    since = time.monotonic() - began
    running = ", ".join(progress.running)
    ended = f", this step about {clock(max(0, progress.step_left_s - since))}" if progress.step_left_s else ""
    left = progress.left_s - since
    return (
        f"[{clock(progress.passed_s + since)}] {progress.doing}"
        f"{f': {running} for {since:.0f} s' if running else ''};"
        f" {f'at most {clock(left)} left{ended}' if left > 0 else 'the time is over, and it ends soon'}"
    )


def _ranked(rows: Sequence[Row]) -> list[Row]:
    tried = [row for row in rows if row.result is not None or row.why]
    return sorted(tried, key=lambda row: -_rate(row) if row.has_worked else 1)


def _cells(row: Row) -> list[str]:
    result = row.result
    said = row.why or ("" if row.verified is None else f"verify: {row.verified}")
    if result is None or result.failure is not None:
        text = said or (result.failure_line if result else "")
        return [row.name, "", "", "", "", text[:100]]
    return [
        row.name,
        f"{_rate(row):.4g}",
        f"{1e3 * _mean([each.step_s for each in row.finals or [result]]):.4g} ms",
        gib(result.peak_bytes),
        "" if result.mfu is None else f"{result.mfu:.1%}",
        ", ".join(filter(None, (said, "ended early" if result.is_pruned else _rounds(row))))[:100],
    ]


def _rate(row: Row) -> float:
    measured = row.finals or ([] if row.result is None else [row.result])
    return _mean([each.samples_per_s for each in measured])


def _mean(values: Sequence[float]) -> float:
    """Return the geometric mean, 0 without values or with one of 0."""
    return geometric_mean(values) if values and all(values) else 0.0


def _rounds(row: Row) -> str:
    return f"{len(row.finals)} round{'' if len(row.finals) == 1 else 's'}" if row.finals else ""


def _conclude(found: Outcome, space: Space, base: BaseRun, output: Path, *, objective: Objective) -> int:
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
    said = _result(found, best, space, objective)
    print(f"best        {best.name}: {said}")
    chart = frontier(
        [
            Spot(
                name=row.name,
                rate=_rate(row),
                gib=row.result.peak_bytes / GIB,
                is_chosen=row is best,
                is_reference=row is found.rows[0],
            )
            for row in found.rows
            if row.result is not None and row.has_worked
        ],
        label="samples per second and peak memory",
    )
    title = f"{type(base.requested.run.module).__name__}: the search for faster settings"
    tiles = [
        ("best", best.name),
        *([(f"gain over {found.rows[0].name}", str(found.gain))] if found.gain is not None else []),
    ]
    sections = [("Speed and memory", chart), ("Configurations", table(_HEAD, [*map(_cells, ranked)]))]
    device = best.result.device if best.result is not None else ""
    paths = [
        write_new(output, ".yaml", "\n".join(_overlay(found, best, space, base, said, objective)) + "\n"),
        write_new(output, ".html", html_page(title, f"{device}, {len(ranked)} rows", tiles=tiles, sections=sections)),
        write_new(output, ".json", json.dumps(_facts(found), indent=1) + "\n"),
    ]
    print(f"written     {', '.join(map(short_path, paths))}")
    words = " ".join(map(shell_word, base.words))
    if not space.is_stock(best.choice) or base.preset is not None:
        print(f"try next    python -m lightning_ups fit {words} --config {shell_word(paths[0])}")
    return 0


def _result(found: Outcome, best: Row, space: Space, objective: Objective) -> str:
    """Return in one line what was found."""
    stock = found.rows[0]
    if not space.is_stock(best.choice):
        if found.gain is None:
            return f"{stock.name} was not measured, so the gain is not known"
        unit = " in samples per second and device" if objective == "cost" else ""
        text = f"{found.gain}{unit} over {stock.name}{'' if found.gain.is_known else ', after one round'}"
        if objective == "memory" and best.result is not None and stock.result is not None:
            text = f"{gib(best.result.peak_bytes)} of memory instead of {gib(stock.result.peak_bytes)}, speed {text}"
        return text
    others = [row for row in found.rows if row is not best and (row.result is not None or row.why)]
    if not others:
        has_more = space.settings or len(found.rows) > 1
        return "nothing else was tried: " + ("the time was over" if has_more else "no setting applies to this run")
    if not any(row.has_worked for row in others):
        return f"nothing faster was found: {len(others)} tried, none worked"
    if max(len(row.finals) for row in found.rows) == 1:
        return "nothing faster was found beyond doubt: there was time for one round only, so give more --minutes"
    return "nothing faster was found beyond doubt"


def _overlay(found: Outcome, best: Row, space: Space, base: BaseRun, said: str, objective: Objective) -> Iterator[str]:
    """Yield the lines of ``tuned.yaml``: each setting with its gain as a comment."""
    yield f"# Found by tune on {best.result.device if best.result is not None else 'this machine'}: {best.name}."
    yield f"# {said[0].upper()}{said[1:]}."
    if not found.is_complete:
        yield "# The search was interrupted."
    if best.choice is None:
        yield f"# verify: {best.verified or 'not asked'}."
        yield f"preset: {base.preset}  # no setting of the search was better"
        return
    parts = {axis: (name, tree) for axis, name, tree in space.parts(best.choice)}
    if parts:
        yield f"# verify: {best.verified or 'not asked'}."
    if base.preset is not None:
        yield f"preset: none  # {'the lines below replace it' if parts else f'{found.rows[0].name} is as fast'}"
    comments: dict[str, str] = {}
    for axis, (name, tree) in parts.items():
        gain = found.gains.get(axis)
        said = "not measured alone" if gain is None else f"{gain:+.1%} in one trial"
        if gain is not None and objective == "memory":
            said = f"{1 / (1 + gain) - 1:+.1%} of memory"
        comments |= dict.fromkeys(map(str.strip, _last_lines(tree)), f"{axis}: {name}, {said}")
    tree = merged([accelerator_of_preset(base), space.tree(best.choice)])
    if not tree and base.preset is not None:
        return
    for line in text_of(tree).splitlines():
        comment = comments.pop(line.strip().removeprefix("- "), None)
        yield f"{line}  # {comment}" if comment else line


def _last_lines(tree: Any) -> list[str]:
    """Return the line of a fragment to which its comment belongs: its class, or its last setting."""
    lines = yaml.safe_load(yaml.safe_dump(tree)) and text_of(tree).splitlines()
    named = [line.strip().removeprefix("- ") for line in lines if "class_path" in line]
    return named[:1] or [lines[-1]]


def _facts(found: Outcome) -> dict[str, Any]:
    return {
        "best": found.best and found.best.name,
        "gain_over_stock": found.gain and found.gain.as_dict(),
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
