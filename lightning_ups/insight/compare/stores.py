"""Find what W&B and MLflow keep of a run: its files in one folder, its metrics in another or in a database."""

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from itertools import chain
from math import inf, nan
from pathlib import Path
from typing import Any

from lightning_ups._compat.optional.wandb_files import RUN_NAME

_MLFLOW_ID = re.compile(r"[0-9a-f]{32}")
_LARGEST = 1.7976931348623157e308  # as which a database of MLflow keeps infinity
_COPIES = ("files", "artifacts")  # of W&B and MLflow


def folder_of_run(folder: Path) -> Path:
    """Return the folder of the run whose copied files are in ``folder``, or ``folder`` itself."""
    is_copy = folder.name in _COPIES and (any(folder.parent.glob("*.wandb")) or _is_of_mlflow(folder.parent))
    return folder.parent if is_copy else folder


def folder_of_manifest(folder: Path) -> Path:
    """Return where ``RunManifest`` wrote, if ``folder`` is what W&B or MLflow keep of a run, or ``folder`` itself."""
    parents = folder.resolve().parents
    found: Iterator[Path] = iter(())
    if any(folder.glob("*.wandb")) and len(parents) > 1:
        found = parents[1].glob(f"*/{folder.resolve().name.rpartition('-')[2]}")
    elif _is_of_mlflow(folder) and len(parents) > 2:
        found = parents[2].glob(f"*/{folder.name}")
    places = chain((folder,), found, (folder / name for name in _COPIES))
    return next((place for place in places if any(place.glob("manifest*.json"))), folder)


def wandb_file(folder: Path) -> Path | None:
    """Return the .wandb file in ``folder``, or that of the run whose folder this is."""
    parents = folder.resolve().parents
    beside = parents[1].glob(f"wandb/*run-*-{folder.resolve().name}/*.wandb") if len(parents) > 1 else ()
    return next(chain(sorted(folder.glob("*.wandb")), beside), None)


def read_mlflow(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the rows, parameters and name of MLflow's run, from its files or a database near or in the working folder.

    Both are empty if ``folder`` is not one of MLflow's, or no such database knows it.
    """
    if not _is_of_mlflow(folder):
        return [], {}
    if (folder / "metrics").is_dir():
        rows = [
            _row(path.relative_to(folder / "metrics").as_posix(), value, step, time)
            for path in _files(folder / "metrics")
            for time, value, step in map(str.split, path.read_text(encoding="utf-8").splitlines())
        ]
        params = {
            path.relative_to(folder / "params").as_posix(): path.read_text(encoding="utf-8")
            for path in _files(folder / "params")
        }
        with suppress(OSError):
            params[RUN_NAME] = (folder / "tags" / "mlflow.runName").read_text(encoding="utf-8")
        return rows, params
    for path in chain.from_iterable(place.glob("*.db") for place in (*folder.resolve().parents[:3], Path())):
        with suppress(sqlite3.Error), closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as base:
            rows = [
                _row(name, nan if is_nan else inf * value if abs(value) >= _LARGEST else value, step, time)
                for name, value, step, time, is_nan in base.execute(
                    "SELECT key, value, step, timestamp, is_nan FROM metrics WHERE run_uuid = ?", (folder.name,)
                )
            ]
            params = base.execute(
                "SELECT key, value FROM params WHERE run_uuid = :run"
                " UNION ALL SELECT :title, name FROM runs WHERE run_uuid = :run",
                {"run": folder.name, "title": RUN_NAME},
            )
            if rows:
                return rows, dict(params)
    return [], {}


def folders_of_database(path: Path) -> list[Path]:
    """Return the folder of each run in a database of MLflow, the last run first; empty if it is not one."""
    with suppress(sqlite3.Error), closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as base:
        runs = base.execute("SELECT experiment_id, run_uuid FROM runs ORDER BY start_time DESC")
        folders = [
            [path.parent / place / str(experiment) / run for place in ("", "mlruns")] for experiment, run in runs
        ]
        return [next((each for each in places if each.exists()), places[0]) for places in folders]
    return []


def _is_of_mlflow(folder: Path) -> bool:
    return _MLFLOW_ID.fullmatch(folder.name) is not None


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _row(name: str, value: Any, step: Any, time: Any) -> dict[str, Any]:
    return {"step": step, name: value, "time": float(time) / 1e3}
