"""Modules that nobody here wrote, trained by stock Lightning, by stock Lightning with torch.compile, and by the preset.

    python benchmarks/zoo.py --gate --deadline 540 --output zoo.jsonl       # 20 modules, three sides, one GPU each
    python benchmarks/zoo.py --sides stock_ddp fsdp2 simple_fsdp --output zoo2.jsonl    # pairs of GPUs
    python benchmarks/zoo.py --report zoo.jsonl --json zoo.json

Each run is a process of its own. The runs of a line go to one GPU. Several runs share a GPU: they compile side by side,
and whoever is timed has it alone (`zoo_gpu.py`). The times to the first step are those of a machine so shared; with
--share 1 they are those of a machine with nothing beside. The file has one record for each call and one for each run;
called again with the same file, what it has is left out. A run that fails is a result; one that the deadline ends is
not, and is made in the next call. Lines whose packages are missing are named and left out.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from cases import add_to
from processes import ROOT, Interrupted, finished, portable, result_of, told_to_end
from zoo_gpu import FOLDER, settle
from zoo_modules import LINES, load
from zoo_report import read, report, summary
from zoo_run import SIDES, run

Records = Mapping[str, Sequence[Mapping[str, Any]]]
GATE_SIDES = ("stock", "stock_compile", "preset")
# Seconds of a run that has the machine for itself, and GiB, before a record of the same run tells better.
EXPECTED = {"stock_compile": 50, "preset": 60, "fsdp2": 60, "simple_fsdp": 60}
EXPECTED_ELSE = 22
EXPECTED_GIB = 12.0
ROOM = 0.92  # of a GPU's memory, for runs that share it
PACKAGES = (
    *(
        "torch",
        "lightning",
        "triton",
        "numpy",
        "transformers",
        "peft",
        "timm",
        "torchvision",
        "torchaudio",
        "diffusers",
    ),
    *("torch-geometric", "neuraloperator", "litgpt", "x-transformers", "segmentation-models-pytorch", "torchdiffeq"),
    *("e3nn", "zuko", "accelerate", "trl", "liger-kernel"),
)


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A script that makes its runs as the zoo does.

    Args:
        script: Makes one run when it is called with ``--run``.
        description: For ``--help``.
        load: Enters the lines in `LINES`.
        sides: Those that are run by default, of `SIDES`.
        share: Runs that share a GPU by default.
        longest_first: Whether runs begin with the longest, or in the order of the lines.
        report: Makes a table of records.
        summary: Makes what ``--json`` keeps.
    """

    script: Path
    description: str | None
    load: Callable[[], object]
    sides: Sequence[str]
    share: int = 2
    longest_first: bool = True
    report: Callable[[Records], str] = report
    summary: Callable[[Records], object] = summary


@dataclass
class Job:
    """The runs of one line that are still to be made, in one round: what each side is expected to take."""

    name: str
    round: int
    seconds: dict[str, float]
    gib: dict[str, float]


@dataclass
class Place:
    """One GPU, or several for runs of several ranks: the lines that it has begun, and the memory that is taken."""

    gpus: str
    folder: Path
    room: float
    begun: list[Job] = field(default_factory=list)
    taken: float = 0.0


class Zoo:
    """Makes runs side by side and keeps their records.

    Args:
        output: The file of records.
        options: Of the command line.
        places: Names of the GPUs that a run may have, for each group of GPUs.
        script: Makes one run.
    """

    def __init__(
        self, output: Path, options: argparse.Namespace, places: Sequence[str], *, script: Path = Path(__file__)
    ) -> None:
        self._output, self._options, self._script = output, options, script.resolve()
        self._began = time.monotonic()
        self._end = self._began + options.deadline
        self._call = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._changed, self._stop = threading.Condition(), threading.Event()
        self._folder = Path(tempfile.mkdtemp(prefix="zoo"))
        self._places = [Place(gpus, self._folder / f"gpu_{gpus.replace(',', '_')}", _room()) for gpus in places]
        for place in self._places:
            place.folder.mkdir()
        self._slow = 1 + (options.share - 1) / 5  # how much longer a run takes beside others
        self._left = 0

    def make(self, jobs: Iterable[Job]) -> int:
        """Make the runs of ``jobs`` in this order; return how many are left for a later call."""
        waiting = deque(jobs)
        self._left = sum(len(job.seconds) for job in waiting)
        places = [place for place in self._places for _ in range(self._options.share)]
        try:
            with told_to_end(), ThreadPoolExecutor(len(places)) as threads:
                workers = [threads.submit(self._work, waiting, place) for place in places]
                try:
                    for worker in workers:
                        worker.result()
                except BaseException:
                    self._stop.set()
                    raise
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)
        return self._left

    def _work(self, waiting: deque[Job], place: Place) -> None:
        while not self._stop.is_set():
            with self._changed:
                found = self._next(waiting, place)
                if found is None:
                    if not place.taken:  # nothing ends that could make room
                        return
                    self._changed.wait(5)
                    continue
                job, side = found
                seconds, gib = job.seconds.pop(side), job.gib[side]
                place.taken += gib
            try:
                if time.monotonic() + seconds < self._end:
                    self._run(job, side, place)
            finally:
                with self._changed:
                    place.taken -= gib
                    self._changed.notify_all()

    def _next(self, waiting: deque[Job], place: Place) -> tuple[Job, str] | None:
        """Return the next run on ``place``: of a line that has begun there, or the first of another line."""
        left = self._end - time.monotonic()
        for job in [*place.begun, *waiting]:
            is_new = job not in place.begun
            if is_new and max(job.seconds.values()) * self._slow > left:
                continue
            for side in job.seconds:
                if place.taken and place.taken + job.gib[side] > place.room:
                    continue
                if is_new:
                    waiting.remove(job)
                    place.begun.append(job)
                return job, side
        return None

    def _run(self, job: Job, side: str, place: Place) -> None:
        options, began = self._options, time.monotonic()
        words = [sys.executable, str(self._script), "--run", job.name, side, "--limit", str(options.limit)]
        words += ["--blocks", *map(str, options.blocks), *(["--tiny"] if options.tiny else [])]
        words += ["--untimed", str(options.untimed)] if options.untimed else []
        cache = tempfile.mkdtemp(dir=self._folder)
        environment = {
            "CUDA_VISIBLE_DEVICES": place.gpus,
            "TORCHINDUCTOR_CACHE_DIR": cache,
            "TRITON_CACHE_DIR": f"{cache}/triton",
            "OMP_NUM_THREADS": str(self._cores()),
            "TORCHINDUCTOR_COMPILE_THREADS": str(self._cores()),
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        is_shared = options.share > 1 and bool(place.gpus)
        if is_shared and SIDES[side].ranks == 1:
            environment[FOLDER] = str(place.folder)
        left = self._end - began
        text = finished(words, timeout=left, ranks=SIDES[side].ranks, environment=environment, stop=self._stop)
        if FOLDER in environment:
            settle(place.folder)
        shutil.rmtree(cache, ignore_errors=True)
        found, seconds = result_of(text), round(time.monotonic() - began, 1)
        if "error_line" not in found and "error" in found:
            if self._stop.is_set() or time.monotonic() >= self._end - 1:
                self._say(f"{job.name} {side}: not done, the time is over")
                return
            ended = f"ended after {options.limit:.0f} s" if "Timeout (" in text else None
            found["error_line"] = ended or _last_line(found["error"])
        if is_shared and "out of memory" in found.get("error", ""):
            self._say(f"{job.name} {side}: not done, memory was short beside others")
            return
        record = {"kind": "run", "line": job.name, "side": side, "round": job.round, "call": self._call}
        record |= {
            "family": LINES[job.name].family,
            "draws": LINES[job.name].draws,
            "tiny": options.tiny,
            "gpus": place.gpus,
            "share": options.share,
            "seconds": seconds,
            **found,
        }
        if notes := _notes(text):
            record["notes"] = notes
        with self._changed:
            add_to(self._output, json.dumps(record) + "\n")
            self._left -= 1
        outcome = found.get("error_line") or f"{found.get('step_ms', '-')} ms, first step {found.get('first_step_s')} s"
        self._say(f"{job.name} {side}: {outcome} ({seconds:.0f} s)")

    def _cores(self) -> int:
        return max(1, min(16, len(os.sched_getaffinity(0)) // len(self._places) // min(4, self._options.share)))

    def _say(self, what: str) -> None:
        print(f"{time.monotonic() - self._began:4.0f} s  {what}", flush=True)

    def record_call(self) -> None:
        """Record what all runs of this call share."""
        record = {"kind": "call", "call": self._call, "command": sys.argv[1:], "commit": _commit(), "cards": _cards()}
        record["versions"] = {"python": sys.version.split()[0], **_versions()}
        add_to(self._output, json.dumps(record) + "\n")


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found


def _commit() -> str:
    words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _cards() -> list[str]:
    words = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["?"])[-1][:300]


def _notes(text: str) -> list[str]:
    """Return the first lines in which lightning_ups tells what it did, such as ``Compile: ...``."""
    parts = (
        "Compile:",
        "BF16Precision:",
        "AccelerationFlags:",
        "FSDP2Strategy:",
        "SimpleFSDPStrategy:",
        "lightning_ups:",
    )
    return [line[:400] for line in dict.fromkeys(text.splitlines()) if line.startswith(parts)][:12]


def places(ranks: int, *, tiny: bool) -> list[str]:
    """Return the GPUs of each group that runs of so many ranks can have."""
    if tiny:
        return [""]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = [name for name in visible if name] or [str(number) for number in range(torch.cuda.device_count())]
    return [",".join(names[i : i + ranks]) for i in range(0, len(names) - ranks + 1, ranks)]


def _room() -> float:
    return ROOM * torch.cuda.mem_get_info()[1] / 2**30 if torch.cuda.is_available() else EXPECTED_GIB


def chosen(options: argparse.Namespace, parser: argparse.ArgumentParser) -> list[str]:
    """Return the names of the lines that are asked for and whose packages are there."""
    if unknown := set(options.only or ()) - LINES.keys():
        parser.error(f"there is no line {', '.join(sorted(unknown))}; --list shows all")
    names = [*(options.only or (name for name, line in LINES.items() if line.gate or not options.gate))]
    missing = {name: [p for p in LINES[name].needs if find_spec(p) is None] for name in names}
    for name, packages in missing.items():
        if packages:
            print(f"{name}: left out, since {', '.join(packages)} is not installed")
    return [name for name in names if not missing[name]]


def jobs(names: Sequence[str], options: argparse.Namespace) -> list[Job]:
    """Return what is not in the file yet."""
    done = {(r["line"], r["side"], r["round"], r["tiny"]): r for r in read([options.output])["run"]}
    alone = {(r["line"], r["side"]): r.get("seconds") for r in done.values() if r.get("share") == 1}
    peaks: dict[str, float] = {}
    for record in done.values():
        peak = max(record.get("peak_gib", 0.0), record.get("first_step_gib", 0.0))
        peaks[record["line"]] = max(peak, peaks.get(record["line"], 0.0))
    made = []
    for turn in range(options.rounds):
        for name in names:
            sides = [s for s in options.sides if options.again or (name, s, turn, options.tiny) not in done]
            seconds = {s: float(alone.get((name, s)) or EXPECTED.get(s, EXPECTED_ELSE)) for s in sides}
            gib = 1.25 * peaks[name] + 1 if peaks.get(name) else EXPECTED_GIB
            if seconds:
                made.append(Job(name, turn, seconds, dict.fromkeys(sides, gib)))
    return made


def main(benchmark: Benchmark) -> None:
    """Make runs, or one run, or the report."""
    benchmark.load()
    parser = argparse.ArgumentParser(
        description=benchmark.description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path(f"{benchmark.script.stem}.jsonl"),
        help="the file of records; it is added to",
    )
    parser.add_argument(
        "--earlier", type=Path, nargs="+", default=[], help="records to begin OUTPUT with, if it is new"
    )
    parser.add_argument("--deadline", "--budget", type=float, default=540, help="seconds for everything")
    parser.add_argument("--limit", type=float, default=300, help="seconds that one run may take")
    parser.add_argument("--gate", action="store_true", help="only the 20 lines of the gate")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these lines")
    parser.add_argument(
        "--sides", nargs="+", choices=SIDES, default=[*benchmark.sides], metavar="SIDE", help=", ".join(SIDES)
    )
    parser.add_argument("--rounds", type=int, default=1, help="how often each run is made, in turns")
    parser.add_argument("--blocks", nargs=2, default=(6, 0.5), metavar=("N", "SECONDS"), help="of timed steps")
    parser.add_argument(
        "--share", type=int, default=benchmark.share, metavar="N", help="runs that share a GPU, or a pair"
    )
    parser.add_argument("--devices", type=int, metavar="N", help="use the first N GPUs or pairs of GPUs (default: all)")
    parser.add_argument("--untimed", type=int, metavar="STEPS", help="end each run after so many steps, for its losses")
    parser.add_argument("--again", action="store_true", help="make runs that the file has already")
    parser.add_argument("--tiny", action="store_true", help="small sizes, on the CPU")
    parser.add_argument("--list", action="store_true", help="print the lines")
    parser.add_argument("--report", type=Path, nargs="+", metavar="FILE", help="print a table of these records")
    parser.add_argument("--json", type=Path, help="where the report is kept as JSON")
    parser.add_argument("--run", nargs=2, metavar=("NAME", "SIDE"), help="make one run here, and print its record")
    options = parser.parse_args()
    if options.report:
        records = read(options.report)
        print(benchmark.report(records))
        if options.json:
            options.json.write_text(json.dumps(benchmark.summary(records), indent=1) + "\n")
    elif options.list:
        for line in LINES.values():
            print(f"{line.name:26} {line.family:26} {'gate' if line.gate else '    '}  {line.way}")
    elif options.run:
        _run_here(options)
    else:
        _run_all(options, parser, benchmark)


def _run_here(options: argparse.Namespace) -> None:
    name, side = options.run
    blocks = (2, 0.0) if options.tiny else (int(options.blocks[0]), float(options.blocks[1]))
    how = replace(SIDES[side], steps=options.untimed or SIDES[side].steps)
    found = run(LINES[name], how, tiny=options.tiny, limit=options.limit, blocks=blocks)
    if os.environ.get("RANK", "0") == "0" or "error" in found:
        # Whole at once, since ranks share the file that it goes to.
        sys.stdout.flush()
        os.write(1, f"\nRESULT {portable(json.dumps(found))}\n".encode())


def _run_all(options: argparse.Namespace, parser: argparse.ArgumentParser, benchmark: Benchmark) -> None:
    ranks = {SIDES[side].ranks for side in options.sides}
    if len(ranks) > 1:
        parser.error("sides of one GPU and of two go in separate calls")
    if not options.output.exists():
        options.output.write_text("".join(path.read_text() for path in options.earlier))
    names = chosen(options, parser)
    at = places(ranks.pop(), tiny=options.tiny)[: options.devices]
    if not at:
        parser.error("there are too few GPUs; --tiny runs on the CPU")
    zoo = Zoo(options.output, options, at, script=benchmark.script)
    if wanted := jobs(names, options):
        if benchmark.longest_first:
            wanted.sort(key=lambda job: -sum(job.seconds.values()))
        zoo.record_call()
        try:
            left = zoo.make(wanted)
        except (KeyboardInterrupt, Interrupted):
            sys.exit(130)
        print(f"{left} runs are left for another call with --output {options.output}" if left else "all runs are made")
    print(benchmark.report(read([options.output])))


if __name__ == "__main__":
    main(Benchmark(script=Path(__file__), description=__doc__, load=load, sides=GATE_SIDES))
