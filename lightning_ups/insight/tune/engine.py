"""Run trials, each in a process of its own with a time limit, on all devices at once, and never twice."""

import json
import os
import queue
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Any

from lightning_ups.insight.processes import end_group, exit_on_signals
from lightning_ups.insight.tune.result import Result, failure_of_exit
from lightning_ups.insight.tune.store import Store, digest

# Of a launcher around the search: a trial starts its own processes.
_OF_LAUNCHERS = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_NTASKS")
_PREFIXES_OF_LAUNCHERS = ("MASTER_", "TORCHELASTIC_")
_COMMAND = (sys.executable, "-m", "lightning_ups", "measured_fit")


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """The words of ``fit`` for one trial: the user's, a preset, and fragments of YAML, the stronger ones last."""

    words: Sequence[str]
    preset: str | None = None  # None: the user's
    fragments: Sequence[str] = ()

    @property
    def all_words(self) -> list[str]:
        """What follows ``fit`` on the command line."""
        preset = [] if self.preset is None else ["--preset", self.preset]
        return [*self.words, *preset, *(word for text in self.fragments for word in ("--config", f"{text}\n"))]


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How long a trial may measure.

    Args:
        seconds: After the first step, unless the rate has settled earlier.
        precision: The standard error of a rate that has settled, as a share of it.
        limit: Seconds after which the process is killed.
        floor: Samples per second; a trial that is far below ends early.
        round: Tells measurements of one configuration apart.
    """

    seconds: float = 10.0
    precision: float = 0.01
    limit: float = 300.0
    floor: float = 0.0
    round: int = 0


class Engine:
    """Runs trials and keeps their results. As a context, it ends what still runs when it is left, also by SIGTERM.

    Args:
        store: Where results are found and kept; None: nowhere.
        identity: What a result depends on beside the words: files, model, device, versions.
        devices: Indices of the GPUs that trials share; empty: a CPU, with one trial at a time.
        per_trial: The number of GPUs of a trial.
        on_result: Called in the thread of the trial with each new result.
        command: Starts the process of a trial; the options of `measured_fit` follow.
    """

    def __init__(
        self,
        *,
        store: Store | None = None,
        identity: Mapping[str, Any] | None = None,
        devices: Sequence[str] = (),
        per_trial: int = 1,
        on_result: Callable[[Configuration, Effort, Result], None] = lambda *_: None,
        command: Sequence[str] = _COMMAND,
    ) -> None:
        self._store, self._identity, self._on_result, self._command = store, dict(identity or {}), on_result, command
        groups = [",".join(devices[i : i + per_trial]) for i in range(0, len(devices) - per_trial + 1, per_trial)]
        self._slots: queue.Queue[str] = queue.Queue()
        for group in groups or [""]:
            self._slots.put(group)
        self.parallel = max(1, len(groups))
        self._pool = ThreadPoolExecutor(self.parallel)
        self._lock, self._running, self._ends = Lock(), set[subprocess.Popen[bytes]](), False
        self._undo = ExitStack()
        self.count = 0  # of processes that were started

    def __enter__(self) -> "Engine":
        self._undo.enter_context(exit_on_signals())
        return self

    def __exit__(self, *_: object) -> None:
        with self._undo:
            self._ends = True
            with self._lock:
                for process in self._running:
                    end_group(process)
            self._pool.shutdown(cancel_futures=True)

    def run(self, configuration: Configuration, effort: Effort) -> Result:
        """Return the result of one trial, from the store if it is there."""
        return self.start(configuration, effort).result()

    def start(self, configuration: Configuration, effort: Effort) -> "Future[Result]":
        """Start a trial as soon as a device is free."""
        return self._pool.submit(self._tried, configuration, effort)

    def _tried(self, configuration: Configuration, effort: Effort) -> Result:
        words = configuration.all_words
        key = digest([words, self._identity, effort.seconds, effort.precision, effort.round])
        found = self._store.find(key) if self._store is not None else None
        if found is None or _is_open(found, effort):
            slot = self._slots.get()
            try:
                found = self._run(words, effort, slot)
            finally:
                self._slots.put(slot)
            if self._ends:
                return found  # it was killed, and is no result
            if self._store is not None:
                self._store.add(key, found, about={"words": words, **self._identity})
        self._on_result(configuration, effort, found)
        return found

    def _run(self, words: Sequence[str], effort: Effort, slot: str) -> Result:
        with TemporaryDirectory(prefix="ups-trial-") as folder:
            options = {
                "--folder": folder,
                "--seconds": effort.seconds,
                "--precision": effort.precision,
                "--floor": effort.floor,
                "--limit": effort.limit,
                "--began": time.time(),
            }
            command = [*self._command, *(str(word) for pair in options.items() for word in pair), *words]
            began = time.perf_counter()
            code, output = self.call(command, limit=effort.limit, slot=slot, output=Path(folder, "output"))
            return replace(_result(Path(folder), code, output, effort), wall_s=time.perf_counter() - began)

    def call(
        self, command: Sequence[str], *, limit: float, slot: str = "", output: Path | None = None
    ) -> tuple[int | None, str]:
        """Run a process and return its exit code, None if it was killed at its limit, and what it printed."""
        if output is None:
            with TemporaryDirectory(prefix="ups-trial-") as folder:
                return self.call(command, limit=limit, slot=slot, output=Path(folder, "output"))
        with output.open("wb") as file, self._process(command, file, slot) as process:
            try:
                code: int | None = process.wait(timeout=limit)
            except subprocess.TimeoutExpired:
                code = None
        return code, output.read_text(encoding="utf-8", errors="replace")

    @contextmanager
    def _process(self, command: Sequence[str], output: Any, slot: str) -> Iterator["subprocess.Popen[bytes]"]:
        with self._lock:
            if self._ends:
                raise KeyboardInterrupt
            self.count += 1
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_environment(slot),
                start_new_session=True,  # so that its workers and ranks end with it
            )
            self._running.add(process)
        try:
            yield process
        finally:
            with self._lock:
                self._running.discard(process)
            end_group(process)


def _is_open(found: Result, effort: Effort) -> bool:
    """Return whether a known result may be another now."""
    if found.failure == "hang":
        return found.wall_s + 1 < effort.limit
    # A pruned trial was far behind another reference, perhaps a faster one.
    return found.is_pruned and found.samples_per_s >= effort.floor


def visible_devices(count: int) -> list[str]:
    """Return the names of ``count`` GPUs that this process may use, for CUDA_VISIBLE_DEVICES."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (named.split(",") if named else [str(index) for index in range(count)])[:count]


def _environment(slot: str) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _OF_LAUNCHERS and not name.startswith(_PREFIXES_OF_LAUNCHERS)
    }
    return {**kept, **({"CUDA_VISIBLE_DEVICES": slot} if slot else {})}


def _result(folder: Path, code: int | None, output: str, effort: Effort) -> Result:
    if code is None:
        steps = (folder / "steps").read_text() if (folder / "steps").exists() else "0"
        taken = f"{steps} steps were taken" if steps != "0" else "no step ended, as when compilation takes long"
        return Result(failure="hang", text=f"It did not end within {effort.limit:.0f} s: {taken}. Give more --limit.")
    failures = sorted(folder.glob("failure-*.json"), key=lambda path: path.stat().st_mtime)  # of ranks, the first
    for path in [*failures, folder / "result.json"]:
        try:
            return Result.of(json.loads(path.read_text()))
        except (OSError, ValueError):
            continue
    return failure_of_exit(code, output)
