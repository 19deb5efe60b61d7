"""Running what a plan lists, each on GPUs of its own, side by side, and no longer than there is time.

    python benchmarks/side_by_side.py benchmarks/rounds/two_gpus.txt --limit 570 --output FOLDER

A plan has one line for each run: its GPUs, the seconds that it may take, its name, and its command.

    0   | 120 | llama_1B-4 | python benchmarks/llama.py --row 1B-4 --budget {seconds} --output {output}
    0 1 | 180 | parity     | python benchmarks/fsdp2.py --set parity --budget {seconds} --output {output}

Runs that share a GPU follow one another as the plan has them; others run at the same time. Each sees its own GPUs
alone and has their share of the processor's cores, so that what one asks of the host is not taken from another. One
that would not end within the limit is left out. On a machine with fewer GPUs than the plan has, runs of one GPU share
those that there are, and runs of more are left out. What a run printed is in FOLDER/NAME/printed.txt, what it kept
beside it. Called again with the same folder it goes on with what has not ended well.
"""

import argparse
import os
import re
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from cases import add_to, prepare
from processes import finished, portable, told_to_end

LEAST = 3  # seconds that the end of a run may take


@dataclass(frozen=True)
class Run:
    """One line of a plan; ``least`` are the seconds that must be left for it to begin, if not all that it may take."""

    gpus: frozenset[int]
    seconds: float
    name: str
    command: str
    least: float | None = None


def runs_of(text: str) -> list[Run]:
    """Read a plan.

    Raises:
        ValueError: If a line is none, or two have one name.
    """
    runs = list[Run]()
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        parts = [part.strip() for part in line.split("|", 3)]
        try:
            gpus, seconds, name, command = parts
            run = Run(frozenset(map(int, gpus.split())), float(seconds), name, command)
        except ValueError:
            raise ValueError(f"line {number} is not GPUs | seconds | name | command: {line}") from None
        if not run.gpus or not re.fullmatch(r"[\w.-]+", name) or name in {other.name for other in runs}:
            raise ValueError(f"line {number} needs GPUs, and a name of its own that a folder can have: {line}")
        runs.append(run)
    return runs


def fitted(runs: Sequence[Run], *, gpus: int) -> list[Run]:
    """Return ``runs`` as a machine with so many GPUs makes them; those that need more are left out, and said."""
    made = list[Run]()
    for run in runs:
        if len(run.gpus) > gpus:
            print(
                f"{run.name}: left out, it needs {len(run.gpus)} GPUs and there {'is' if gpus == 1 else 'are'} {gpus}"
            )
        elif (first := min(run.gpus)) + len(run.gpus) > gpus or max(run.gpus) >= gpus:
            made.append(replace(run, gpus=frozenset((first + other) % gpus for other in range(len(run.gpus)))))
        else:
            made.append(run)
    return made


def cores_of(run: Run, *, gpus: int) -> list[int]:
    """Return the cores that a run has on a machine with so many GPUs."""
    cores = sorted(os.sched_getaffinity(0))
    shares = [cores[gpu * len(cores) // gpus : (gpu + 1) * len(cores) // gpus] for gpu in sorted(run.gpus)]
    return [core for share in shares for core in share] or cores


def visible_as(gpu: int) -> str:
    """Return what a run is told, so that it sees this one of the GPUs that are visible here."""
    here = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return here[gpu].strip() if gpu < len(here) and here[gpu].strip() else str(gpu)


class SideBySide:
    """Runs that go on at the same time.

    Args:
        folder: Where each keeps its output, in a folder of its name.
        limit: Seconds for everything.
        gpus: Of this machine.
    """

    def __init__(self, folder: Path, *, limit: float, gpus: int) -> None:
        self._folder, self._end, self._gpus = folder, time.monotonic() + limit, gpus
        self._begun, self._stop = time.monotonic(), threading.Event()
        self._known = folder / "ended.txt"

    def all_of(self, runs: Sequence[Run]) -> bool:
        """Make ``runs``, and return whether all of them ended well, now or in an earlier call."""
        well = self._known.read_text().split() if self._known.exists() else []
        pending = [run for run in runs if run.name not in well]
        done, going = len(runs) - len(pending), dict[Run, Future[bool]]()
        with ThreadPoolExecutor(len(pending) or 1) as threads:
            try:
                while pending or going:
                    for run in [run for run, future in going.items() if future.done()]:
                        done += going.pop(run).result()
                    taken = {gpu for run in going for gpu in run.gpus}
                    for run in [*pending]:
                        needed = run.least or run.seconds
                        if time.monotonic() + needed + LEAST > self._end:
                            pending.remove(run)
                            self._say(run, f"left out, since it may take {needed:.0f} s")
                        elif run.gpus.isdisjoint(taken):
                            pending.remove(run)
                            going[run] = threads.submit(self._make, run)
                        taken |= run.gpus  # what comes later waits for what comes first
                    time.sleep(0.05)
            except BaseException:
                self._stop.set()
                raise
        return done == len(runs)

    def _make(self, run: Run) -> bool:
        output = self._folder / run.name
        output.mkdir(parents=True, exist_ok=True)
        printed = output / "printed.txt"
        command = run.command.replace("{seconds}", f"{run.seconds:.0f}").replace("{output}", shlex.quote(str(output)))
        add_to(printed, f"===== {command}\n")
        words = ["bash", "-c", f'( {command}\n) >> {shlex.quote(str(printed))} 2>&1; echo "exit code $?"']
        if shutil.which("taskset"):
            words = ["taskset", "--cpu-list", ",".join(map(str, cores_of(run, gpus=self._gpus))), *words]
        visible = ",".join(visible_as(gpu) for gpu in sorted(run.gpus))
        self._say(run, f"begins on GPU {visible}")
        begun = time.monotonic()
        limit = min(run.seconds, self._end - LEAST - begun)
        how = finished(words, timeout=limit, environment={"CUDA_VISIBLE_DEVICES": visible}, stop=self._stop)
        printed.write_text(portable(printed.read_text(errors="replace")))
        how = how.strip().splitlines()[-1]
        self._say(run, f"{how}, {time.monotonic() - begun:.0f} s in all")
        if well := how == "exit code 0":
            add_to(self._known, f"{run.name}\n")
        return well

    def _say(self, run: Run, what: str) -> None:
        print(f"{time.monotonic() - self._begun:4.0f} s  {run.name}: {what}", flush=True)


def main() -> None:
    """Make the runs of a plan."""
    parser = argparse.ArgumentParser()
    parser.add_argument("plan", type=Path)
    parser.add_argument("--limit", type=float, default=570, help="seconds for everything")
    parser.add_argument("--output", type=Path, required=True, help="where each run has a folder")
    parser.add_argument("--only", nargs="+", help="only the runs of these names")
    options = parser.parse_args()
    try:
        runs = runs_of(options.plan.read_text())
    except (OSError, ValueError) as error:
        parser.error(f"{options.plan}: {getattr(error, 'strerror', None) or error}")
    if unknown := set(options.only or ()) - {run.name for run in runs}:
        parser.error(f"{options.plan} has no run {sorted(unknown)[0]!r}")
    runs = [run for run in runs if options.only is None or run.name in options.only]
    prepare(parser, options.output)
    if present := torch.cuda.device_count():
        runs = fitted(runs, gpus=present)
    needed = max((gpu + 1 for run in runs for gpu in run.gpus), default=1)
    gpus = max(needed, present)
    with told_to_end():
        well = SideBySide(options.output, limit=options.limit, gpus=gpus).all_of(runs)
    sys.exit(not well)


if __name__ == "__main__":
    main()
