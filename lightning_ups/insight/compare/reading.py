"""Read a run from its folder, or from one file of logs: series by step, step times, and settings."""

import csv
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from lightning_ups._compat.optional.wandb_files import RUN_NAME, read_wandb
from lightning_ups.insight.compare.intervals import Array
from lightning_ups.insight.compare.stores import (
    folder_of_manifest,
    folder_of_run,
    folders_of_database,
    read_mlflow,
    wandb_file,
)
from lightning_ups.insight.report import flattened, read_manifest

_STEPS = ("trainer/global_step", "global_step", "step", "Step", "_step", "iteration", "iter")
_NO_METRICS = re.compile(r"epoch|hp_metric|_step|_timestamp|_runtime|.*__(MIN|MAX)")
_STEP_TIME = re.compile(
    r"(train_)?(step|iter|iteration|batch)_?((time|duration)(_?(ms|s|sec|seconds))?|(?<=_)(ms|s|sec|seconds))"
    r"|(ms|s|sec|seconds|time)_per_(step|iter|iteration|batch)"
)
_CLOCK = re.compile(r"_?(wall_?)?(time|timestamp|runtime|elapsed|elapsed_time)|relative time.*")
_OF_MANIFEST = "the manifest"
_KINDS = ("step_times.csv", "throughput/step_ms", "a column", "a clock", _OF_MANIFEST)  # the best first
# What a run measures, where it lies and when it ran: effects, or different in all runs.
_NO_SETTINGS = re.compile(
    r"schema|run/(started|duration_s|kind)|report/(TokenThroughput/.*|.*/lines(/.*)?|.*(_s|_ms|seconds))|compiled/.*|.*/from_cache"
    r"|device/gpus/\d+/(clock|temp|power_w|util).*|config/(ckpt_path|trainer/(default_root_dir|logger)).*"
)


@dataclass(frozen=True, slots=True)
class Series:
    """Values by step, in ascending order."""

    steps: Array
    values: Array


@dataclass(frozen=True, kw_only=True)
class RunLog:
    """What the files of a run say.

    Args:
        name: The path that was given.
        title: The name of the run in W&B or MLflow; empty: none.
        series: The metrics, by name.
        times: Seconds of steps, by where they come from.
        settings: Settings, versions and hardware, flat.
        manifest: The whole manifest; empty if there is none.
        notes: Files that are not used, and why.
    """

    name: str
    title: str = ""
    series: dict[str, Series]
    times: dict[str, Series]
    settings: dict[str, Any] = field(default_factory=dict)
    manifest: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def best_times(runs: Iterable[RunLog]) -> str | None:
    """Return the best source of step times that all ``runs`` have."""
    runs = list(runs)
    return next((kind for kind in _KINDS if all(kind in run.times for run in runs)), None)


def read_run(given: str, *, time: str | None = None) -> RunLog:
    """Read a run.

    Args:
        given: A folder with logs, or a file: CSV, JSON or JSON lines of a history, events of TensorBoard, W&B's
            .wandb, or a manifest.
        time: The column with the seconds of a step, or with a clock. None: found by its name.

    Raises:
        ValueError: If there is nothing to read.
    """
    path = Path(given)
    if not path.exists():
        near = sorted(each.name for each in path.parent.iterdir())[:5] if path.parent.is_dir() else []
        raise ValueError(f"{given} does not exist. Its folder has: {', '.join(near) or 'nothing'}.")
    if path.name.startswith("manifest") and path.suffix == ".json":
        return _read_folder(given, path.parent, time=time, manifest=path)
    if path.is_dir():
        return _read_folder(given, path, time=time)
    if wandb_file(path.parent) == path and not (path.parent / "metrics.csv").exists():
        return _read_folder(given, path.parent, time=time)
    if ".tfevents." in path.name:
        series, clocks = _events(path)
        return RunLog(name=given, series=series, times=clocks)
    return _from_rows(given, *_rows(path), time=time)


def _read_folder(given: str, folder: Path, *, time: str | None, manifest: Path | None = None) -> RunLog:
    folder = folder_of_run(folder)
    home = folder_of_manifest(folder)
    manifest = manifest or _manifest(home)
    known = read_manifest(manifest) if manifest else {}
    table = folder / "metrics.csv" if (folder / "metrics.csv").exists() else wandb_file(folder)
    rows, settings = _rows(table) if table else read_mlflow(folder)
    notes = [] if rows or not table else [f"{table} is not used: it has no rows."]
    title = settings.get(RUN_NAME, "")
    found = _from_rows(given, rows, settings, time=time) if rows else RunLog(name=given, series={}, times={})
    settings.pop(RUN_NAME, None)
    series, times, settings = found.series, found.times, flattened(settings)
    of_throughput = known.get("report", {}).get("TokenThroughput", {})
    written = of_throughput.get("step_times")
    exact = home / (written if isinstance(written, str) else "step_times.csv")
    if time is None and exact.exists():
        try:
            times["step_times.csv"] = _from_rows(str(exact), *_rows(exact), time="step_ms").times["a column"]
        except ValueError:
            notes.append(f"{exact} is not used: it has no row with a step and its step_ms.")
    if time is None and isinstance(seconds := of_throughput.get("step_s"), float):
        times[_OF_MANIFEST] = Series(np.zeros(1), np.full(1, seconds))
    if any(folder.glob("*.tfevents.*")):
        of_events, clocks = _events(folder)
        series, times = of_events | series, (clocks | times if time is None else times)
    if known and not (series or notes):
        notes.append(
            f"{given} has a manifest.json and no metrics. If its logger keeps them elsewhere, name that, such as"
            " wandb/run-* or a CSV export, or start compare in the folder of mlflow.db."
        )
    if not (series or times or known):
        below = (each for pattern in ("*/*", "*/*/*", "*/*/artifacts/*") for each in folder.glob(pattern))
        inside = sorted({folder_of_run(each.parent).relative_to(folder).as_posix() for each in below if _is_log(each)})
        cure = f"Name one of its runs, such as {given.rstrip('/')}/{inside[-1]}." if inside else "Name a run's folder."
        if notes:
            raise ValueError(" ".join([*notes, "Name a run that logged something."]))
        raise ValueError(
            f"{given} has no metrics.csv, TensorBoard events, .wandb file, step_times.csv or manifest.json. {cure}"
        )
    if known:
        settings = flattened(known)
    elif not settings:
        settings = {}
        for name in ("hparams.yaml", "config.yaml"):
            if (folder / name).exists():
                settings |= flattened(_yaml(folder / name))
    settings = {
        name: value for name, value in settings.items() if not _NO_SETTINGS.fullmatch(name.removeprefix("manifest/"))
    }
    return RunLog(name=given, title=title, series=series, times=times, settings=settings, manifest=known, notes=notes)


def _is_log(path: Path) -> bool:
    return path.name in ("metrics.csv", "manifest.json") or ".tfevents." in path.name or path.suffix == ".wandb"


def _manifest(folder: Path) -> Path | None:
    """Return the manifest of the last fit, which validations and tests may follow in the same folder."""
    paths = sorted(folder.glob("manifest*.json"), key=lambda each: (len(each.name), each.name), reverse=True)
    fits = (each for each in paths if read_manifest(each).get("run", {}).get("kind") == "fit")
    return next(fits, next(iter(paths), None))


def _rows(path: Path) -> tuple[Sequence[Mapping[str, Any]], dict[str, Any]]:
    """Return the rows of a table, and the settings if the file has them."""
    if path.suffix == ".wandb":
        return read_wandb(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        if runs := folders_of_database(path):
            raise ValueError(
                f"{path} is a database of MLflow. Give the folder of a run, EXPERIMENT/RUN, and create it if it is"
                f" missing. It has {len(runs)}: {', '.join(map(str, runs[:3]))}."
            ) from None
        raise ValueError(
            f"{path} is not a text file. Give a CSV, JSON or .wandb file, or a run's folder, such as"
            " lightning_logs/version_0 or mlruns/1/ID."
        ) from None
    if path.suffix == ".csv":
        return list(csv.DictReader(text.splitlines())), {}
    try:
        if text.lstrip().startswith("{") and "\n{" in text.strip():
            return [json.loads(line) for line in text.splitlines() if line.strip()], {}
        content = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}. Give a CSV or JSON export of a run's history.") from None
    if isinstance(content, dict) and content and all(isinstance(each, dict) for each in content.values()):
        keys = dict.fromkeys(key for column in content.values() for key in column)  # of pandas' to_json
        content = [{name: column.get(key) for name, column in content.items()} for key in keys]
    if not isinstance(content, list) or not all(isinstance(row, dict) for row in content):
        raise ValueError(f"{path} has no rows. Give a list of objects, one for each row, or a CSV export.")
    return content, {}


def _from_rows(given: str, rows: Sequence[Mapping[str, Any]], settings: dict[str, Any], *, time: str | None) -> RunLog:
    columns = dict.fromkeys(name for row in rows for name in row if name)
    if not any(value not in ("", None) for row in rows for value in row.values()):
        raise ValueError(f"{given} has no rows. Name a run that logged something.")
    step = next((name for name in _STEPS if name in columns), None)
    if step is None:
        raise ValueError(
            f"{given} has no column of steps, but {', '.join([*columns][:5]) or 'no columns'}. Name one of them 'step'."
        )
    columns = {name: _column(rows, step, name) for name in columns if name != step}
    columns = {name: series for name, series in columns.items() if len(series.steps)}
    runs = {name.partition(" - ")[0] for name in columns if " - " in name}
    if len(runs) > 1:
        raise ValueError(f"{given} holds {len(runs)} runs: {', '.join(sorted(runs)[:5])}. Export one run to a file.")
    columns = {name.partition(" - ")[2] or name: series for name, series in columns.items()}
    if time is not None and time not in columns:
        raise ValueError(f"{given} has no column {time!r} (--time), but {', '.join([*columns][:12])}.")
    times: dict[str, Series] = {}
    for name in [*columns] if time is None else [time]:
        found, last = columns[name], _last(name)
        if name == "throughput/step_ms":
            times[name] = Series(found.steps, found.values / 1e3)
        elif _is_clock(found) and not _STEP_TIME.fullmatch(last) and (name == time or _CLOCK.fullmatch(last)):
            times.setdefault("a clock", _between(found))
        elif name == time or _STEP_TIME.fullmatch(last) or _CLOCK.fullmatch(last):
            seconds = found.values / (1e3 if re.search(r"(\b|_)ms(\b|_)", last) else 1)
            times.setdefault("a column", Series(found.steps, seconds))
        else:
            continue
        del columns[name]
    series = {name: found for name, found in columns.items() if not _NO_METRICS.fullmatch(name)}
    title = settings.pop(RUN_NAME, "")
    return RunLog(name=given, title=title, series=series, times=times, settings=flattened(settings))


def _last(name: str) -> str:
    return re.split(r"[/|.]", name)[-1].lower()


def _column(rows: Iterable[Mapping[str, Any]], step: str, name: str) -> Series:
    found: dict[float, float] = {}
    for row in rows:
        at, value = _number(row.get(step)), _number(row.get(name))
        # Of a clock the first value of a step counts, since validation follows.
        if at is not None and value is not None and not (at in found and _CLOCK.fullmatch(_last(name))):
            found[at] = value
    return _series(found)


def _series(found: Mapping[float, float]) -> Series:
    steps = np.array(sorted(found))
    return Series(steps, np.array([found[step] for step in steps]))


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or value is None or value == "":
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _is_clock(series: Series) -> bool:
    return len(series.values) > 2 and bool(np.all(np.diff(series.values) > 0))


def _between(clock: Series) -> Series:
    """Return the seconds of a step between two readings of a clock."""
    seconds = np.diff(clock.values) / np.diff(clock.steps)
    kept = seconds > 0
    return Series(clock.steps[1:][kept], seconds[kept])


def _events(path: Path) -> tuple[dict[str, Series], dict[str, Series]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events: Any = EventAccumulator(str(path), size_guidance={"scalars": 0})
    events.Reload()
    scalars = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
    series = {
        tag: _series({float(event.step): event.value for event in found})
        for tag, found in scalars.items()
        if not _NO_METRICS.fullmatch(tag)
    }
    times = {}
    if "throughput/step_ms" in series:
        times["throughput/step_ms"] = Series(
            series["throughput/step_ms"].steps, series["throughput/step_ms"].values / 1e3
        )
    if scalars:
        longest = max(scalars.values(), key=len)
        clock = _series({float(event.step): event.wall_time for event in reversed(longest)})
        if _is_clock(clock):
            times["a clock"] = _between(clock)
    return series, times


class _Tags(yaml.SafeLoader):
    """Reads hparams.yaml, which may name Python's classes, without creating anything."""


_Tags.add_multi_constructor("", lambda _, tag, node: f"{tag} {getattr(node, 'value', '')}"[:80])


def _yaml(path: Path) -> Any:
    try:
        return yaml.load(path.read_text(encoding="utf-8"), _Tags) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {str(error).splitlines()[0]}. Mend it, or remove it.") from None
