"""The judge of `tune`: its winner on ten modules of the zoo, against a fixed grid of 16 settings and the preset.

    python benchmarks/tune_zoo.py --output zoo_tuned --share 4 --budget 540     # again until nothing is left
    python benchmarks/tune_zoo.py --output zoo_tuned --only llama t5 --steps final
    python benchmarks/tune_zoo.py --output zoo_tuned --report

For each module it makes a file for ``fit`` and takes three steps: `grid` measures each setting of the grid, `tune` runs
the command in slices, and `final` measures stock Lightning (bf16-mixed), the preset, the best of the grid and the
winner of `tune` by turns, in one call on one GPU. All are trials of the engine of `tune`. A setting of the grid that is
refused or fails is a row.

The folder keeps records.jsonl, log.txt, and results.jsonl, which is the store of `tune`. A later call with the same
folder does what is left, also on another machine. What the budget ends is no result. The best of the grid is the best
of those whose first losses are those of stock Lightning.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import yaml
from cases import add_to
from processes import ROOT, Interrupted, finished, portable, told_to_end
from tune_zoo_run import BUILDING, HELD_OUT, Setting, micro_batch, run_yaml, settings
from zoo import _cards, _commit, _versions, places
from zoo_modules import load

from lightning_ups.insight.tune import (
    LEAST,
    Configuration,
    Effort,
    Engine,
    Result,
    Rounds,
    digest,
    loss_difference,
    merged,
    text_of,
)

STEPS = ("grid", "tune", "final")
LOSS_DIFFERS = 0.05  # of the mean loss of the first steps, as in `tune`
NEAR = 0.02  # what the winner may be slower than the best of the grid
SPARE = 20  # seconds at the end of a call, to write and to end processes
EXPECTED = 60.0  # seconds of a trial, before others of the line tell better
FEWEST = 2  # rounds of a final
SHORTEST = 60  # seconds of a slice of `tune` that is worth its start
VERIFY = (sys.executable, "-m", "lightning_ups", "verify", "--no_faults")


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the configurations of the final."""

    name: str
    configuration: Configuration


class Judge:
    """Takes the steps of one line, on the GPU that this process sees.

    Args:
        line: The name.
        options: Of the command line.
        engine: Runs trials.
        tune: The command that is judged.
    """

    def __init__(
        self,
        line: str,
        options: argparse.Namespace,
        engine: Engine,
        *,
        tune: Sequence[str] = (sys.executable, "-m", "lightning_ups", "tune"),
    ) -> None:
        self._line, self._options, self._engine, self._tune = line, options, engine, tune
        self._end = options.until - SPARE
        self._preset = "cpu" if options.tiny else "h100"
        self._folder = run_folder(line, tiny=options.tiny)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._batch = micro_batch(line, tiny=options.tiny)
        file = self._folder / "run.yaml"
        file.write_text(run_yaml(line, preset=self._preset, tiny=options.tiny, batch=self._batch))
        self._words = ["--config", file.name]  # relative, so that the store knows it on another machine

    def take(self, steps: Iterable[str]) -> bool:
        """Take the steps that are not done; return whether all are."""
        os.chdir(self._folder)
        done = {"grid": self._grid, "tune": self._slice, "final": self._final}
        return all(done[step]() for step in steps)

    def records(self, kind: str) -> list[dict[str, Any]]:
        """Return the records of this line."""
        return [r for r in read(self._options.output, tiny=self._options.tiny) if _is(r, kind, self._line)]

    @property
    def _left(self) -> float:
        return self._end - time.time()

    def _note(self, kind: str, **facts: Any) -> None:
        gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        record = {"kind": kind, "line": self._line, "tiny": self._options.tiny, "gpu": gpu, "time": _now(), **facts}
        add_to(self._options.output / "records.jsonl", portable(json.dumps(record, default=str)) + "\n")

    def _say(self, what: str) -> None:
        text = f"{self._line}: {what}"
        print(text, flush=True)
        add_to(self._options.output / "log.txt", f"{_now()}  {portable(text)}\n")

    # The grid

    def _grid(self) -> bool:
        for setting in settings(tiny=self._options.tiny):
            if self._known(setting) is not None:
                continue
            expected = self._expected()
            if self._left < expected:
                self._say(f"grid: no time for {setting.name}")
                return False
            found = self._trial(self._configuration(setting), round=0)
            if found is None:
                self._say(f"grid: {setting.name}: the time of the call was over")
                return False
            self._note("grid", setting=setting.name, key=self._key(setting), result=found.as_dict())
            self._say(f"grid: {setting.name}: {_said(found)}")
        return True

    def _key(self, setting: Setting) -> str:
        return digest([setting.texts(self._batch), self._batch])

    def _known(self, setting: Setting) -> Result | None:
        key = self._key(setting)
        found = [Result.of(record["result"]) for record in self.records("grid") if record["key"] == key]
        return found[-1] if found else None

    def _configuration(self, setting: Setting) -> Configuration:
        tree = merged(yaml.safe_load(text) for text in setting.texts(self._batch))
        return Configuration(words=self._words, preset="none", fragments=[text_of(tree)])

    def _expected(self) -> float:
        """Return the seconds that a trial is expected to take."""
        worked = [Result.of(record["result"]) for record in self.records("grid")]
        seconds = [each.wall_s for each in worked if each.failure is None]
        return 1.3 * statistics.median(seconds) if seconds else (20.0 if self._options.tiny else EXPECTED)

    def _trial(self, configuration: Configuration, *, round: int) -> Result | None:
        """Return the result of a trial, or None if the end of the call ended it."""
        if self._left < 1:
            return None
        limit = min(self._options.limit, self._left)
        found = self._engine.run(configuration, Effort(seconds=self._options.seconds, limit=limit, round=round))
        return None if found.failure == "hang" and limit < self._options.limit else found

    # The command

    def _slice(self) -> bool:
        """Run `tune` for what is left of its minutes, or of this call; return whether it has ended by itself."""
        slices = self.records("tune")
        if any(record["is_complete"] for record in slices):
            return True
        if self._left < SHORTEST:
            self._say("tune: no time for a slice")
            return False
        used = sum(record["wall_s"] for record in slices)
        # What the store has is found again at once. The last 30 % are those of the final.
        minutes = max(self._options.minutes - used / 60, 0.3 * self._options.minutes)
        output = self._folder / "tuned"
        for path in self._folder.glob("tuned*"):
            path.unlink()
        command = [*self._tune, *self._words, "--minutes", f"{minutes:.2f}", "--keep-global-batch"]
        command += ["--seconds", f"{self._options.seconds:g}", "--limit", f"{self._options.limit:g}"]
        command += ["--output", output.name, "--store", str(self._options.output.resolve())]
        began = time.monotonic()
        code, text = interrupted_after(command, self._left)
        wall_s = time.monotonic() - began
        facts = _facts_of(output)
        is_complete = code in (0, 1) and bool(facts.get("is_complete", "No configuration was measured" in text))
        self._note(
            "tune",
            minutes=self._options.minutes,
            wall_s=round(wall_s, 1),
            code=code,
            said=text[-1500:],
            **{**facts, "is_complete": is_complete},
        )
        shown = facts.get("best") or (text.strip().splitlines() or ["nothing"])[-1][:200]
        self._say(f"tune: {'complete' if is_complete else 'to be continued'} after {used + wall_s:.0f} s: {shown}")
        return is_complete

    # The final

    def _final(self) -> bool:
        if self.records("final"):
            return True
        sides = {side.name: side for side in self._sides()}
        if "tune" not in sides:
            self._say("final: the grid or tune is not complete")
            return False
        least = min(FEWEST * len(sides) * self._expected(), self._options.most)
        if self._left < least:
            self._say(f"final: it needs {least:.0f} s of one call, {self._left:.0f} s are left")
            return False
        results = self._rounds(sides)
        if results is None:
            self._say("final: the time of the call was over; another call begins it anew")
            return False
        failed = {name: found[-1].failure_line for name, found in results.items() if found[-1].failure}
        worked = {name: found for name, found in results.items() if name not in failed}
        facts: dict[str, Any] = {"card": _card(), "failed": failed}
        facts["rates"] = {name: [each.samples_per_s for each in found] for name, found in worked.items()}
        if "tune" in worked:
            known = Rounds(worked)
            gains = {name: known.gain("tune", name) for name in worked if name != "tune"}
            facts["gains"] = {name: [gain.value, gain.low, gain.high] for name, gain in gains.items()}
            if "grid" in gains and gains["grid"].value < -NEAR:
                facts["grid_verified"] = self._verified(sides["grid"].configuration)
        self._note("final", grid=self._best_of_grid()[0], **facts)
        return True

    def _rounds(self, sides: Mapping[str, Side]) -> dict[str, list[Result]] | None:
        """Measure all sides by turns; return the complete rounds, or None if the end of the call left too few."""
        results: dict[str, list[Result]] = {name: [] for name in sides}
        for number in range(self._options.rounds):
            order = [*sides] if number % 2 == 0 else [*sides][::-1]
            for name in order:
                if any(each.failure for each in results[name]):
                    continue
                found = self._trial(sides[name].configuration, round=number + 1)
                if found is None:
                    return {name: each[:number] for name, each in results.items()} if number >= FEWEST else None
                results[name].append(found)
                self._say(f"final: round {number + 1}: {name}: {_said(found)}")
        return results

    def _sides(self) -> Iterator[Side]:
        first = next(iter(settings(tiny=self._options.tiny)))
        yield Side(name="stock", configuration=self._configuration(first))
        yield Side(name="preset", configuration=Configuration(words=self._words, preset=self._preset))
        grid, setting = self._best_of_grid()
        if setting is not None:
            yield Side(name="grid", configuration=self._configuration(setting))
        overlay = next((r["overlay"] for r in self.records("tune")[::-1] if r["is_complete"] and "overlay" in r), None)
        if grid is not None and overlay is not None:
            yield Side(name="tune", configuration=Configuration(words=self._words, fragments=[overlay]))

    def _best_of_grid(self) -> tuple[str | None, Setting | None]:
        """Return the fastest setting whose losses are those of stock Lightning, if all were measured."""
        known = {setting: self._known(setting) for setting in settings(tiny=self._options.tiny)}
        stock = next(iter(known.values()))
        if any(result is None for result in known.values()) or stock is None:
            return None, None
        worked = {each: result for each, result in known.items() if result is not None and result.failure is None}
        sound = {each: result for each, result in worked.items() if _is_sound(result, stock)}
        best = max(sound, key=lambda each: sound[each].samples_per_s, default=None)
        return (None if best is None else best.name), best

    def _verified(self, configuration: Configuration) -> str:
        code, text = self._engine.call([*VERIFY, *configuration.all_words], limit=max(1.0, self._left))
        last = (text.strip().splitlines() or [""])[-1]
        return "passed" if code == 0 else f"{'no time' if code is None else f'code {code}'}: {last[:200]}"


def _facts_of(output: Path) -> dict[str, Any]:
    """Return what `tune` has written."""
    try:
        found = json.loads(output.with_suffix(".json").read_text())
        overlay = output.with_suffix(".yaml").read_text()
    except (OSError, ValueError):
        return {}
    best = next((row for row in found["rows"] if row["name"] == found["best"]), {})
    rows = [
        {
            "name": row["name"],
            "rate": (row["result"] or {}).get("samples_per_s"),
            "why": row["why"] or (row["result"] or {}).get("failure"),
            "verified": row["verified"],
        }
        for row in found["rows"]
    ]
    return {
        **{key: found[key] for key in ("best", "gain_over_stock", "is_complete")},
        "verified": best.get("verified"),
        "overlay": overlay,
        "rows": rows,
    }


def interrupted_after(command: Sequence[str], seconds: float, *, grace: float = SPARE / 2) -> tuple[int | None, str]:
    """Run a command, with Ctrl-C after ``seconds``; return its exit code, None if that did not end it, and its text."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        # The mark of this call would be a part of what the store of `tune` knows a result by.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("UPS_BENCHMARK")}
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment
        )
        try:
            process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=grace)
        finally:
            code = process.poll()
            if code is None:
                process.kill()
                process.wait()
        output.seek(0)
        return code, output.read()


def run_folder(line: str, *, tiny: bool) -> Path:
    """Return the folder in which the commands of a line run: the same on each machine, as the store knows it."""
    return Path("/tmp") / "tune_zoo" / (f"tiny_{line}" if tiny else line)


def read(folder: Path, *, tiny: bool) -> list[dict[str, Any]]:
    """Return the records of a folder; a line that was interrupted does not count."""
    found, path = [], folder / "records.jsonl"
    for text in path.read_text().splitlines() if path.exists() else ():
        with suppress(json.JSONDecodeError):
            found.append(json.loads(text))
    return [record for record in found if record["tiny"] == tiny]


def _is(record: Mapping[str, Any], kind: str, line: str) -> bool:
    return record["kind"] == kind and record.get("line") == line


def _is_sound(result: Result, stock: Result) -> bool:
    difference = loss_difference(result, stock)
    return difference is None or abs(difference) < LOSS_DIFFERS


def _said(result: Result) -> str:
    if result.failure is not None:
        return result.failure_line[:160]
    return f"{result.samples_per_s:.5g} samples/s ± {result.error:.1%} ({result.wall_s:.0f} s)"


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _card() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


# The report


def report(records: Sequence[Mapping[str, Any]], lines: Iterable[str]) -> str:
    """Return the table: rates of the final, and the ratios of the winner of `tune`."""
    head = ("module", "stock", "preset", "grid", "tune", "tune/stock", "tune/preset", "tune/grid", "verify", "minutes")
    table, notes = [[*head, "meets"]], []
    for line in lines:
        slices = [r for r in records if _is(r, "tune", line)]
        grid = {r["setting"]: Result.of(r["result"]) for r in records if _is(r, "grid", line)}
        final = next((r for r in records if _is(r, "final", line)), None)
        name = f"{line} *" if line in HELD_OUT else line
        minutes = f"{sum(r['wall_s'] for r in slices) / 60:.1f}"
        if final is None:
            failed = sum(each.failure is not None for each in grid.values())
            is_tuned = any(r["is_complete"] for r in slices)
            if grid or slices:
                state = f"grid {len(grid)} ({failed} failed), tune {'complete' if is_tuned else 'not complete'}"
                table.append([name, state, *[""] * (len(head) - 3), minutes, "-"])
            continue
        tuned = next(r for r in slices[::-1] if r["is_complete"])
        rates, gains = final["rates"], final.get("gains", {})
        cells = [_rate(rates.get(side)) for side in ("stock", "preset", "grid", "tune")]
        ratios = [_ratio(gains.get(side)) for side in ("stock", "preset", "grid")]
        table.append([name, *cells, *ratios, tuned["verified"] or "-", minutes, "yes" if meets(final) else "NO"])
        notes.append(f"{line}: {final['card']}; grid: {final['grid']}; tune: {tuned['best']}")
        notes += [f"{line}: {side} failed: {why}" for side, why in final["failed"].items()]
        if "grid_verified" in final:
            notes.append(f"{line}: verify of the best of the grid: {final['grid_verified']}")
    widths = [max(len(row[column]) for row in table if row[-1] != "-") for column in range(len(table[0]))]
    shown = ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    return "\n".join([*shown, "", "samples/s: median [least, most] of the rounds; * held out", *notes])


def meets(final: Mapping[str, Any]) -> bool:
    """Return whether the winner is as fast as the preset, and within 2 % of the best of the grid."""
    gains = final.get("gains", {})
    is_as_fast = "preset" not in gains or gains["preset"][0] >= -LEAST
    return bool(gains) and is_as_fast and ("grid" not in gains or gains["grid"][0] >= -NEAR)


def _rate(rates: Sequence[float] | None) -> str:
    if not rates:
        return "failed"
    return f"{statistics.median(rates):.5g} [{min(rates):.4g}, {max(rates):.4g}]"


def _ratio(gain: Sequence[float] | None) -> str:
    return "-" if gain is None else "{:.3f} [{:.3f}, {:.3f}]".format(*(1 + each for each in gain))


# All lines, several at once


class Lines:
    """Judges lines, one on each GPU at a time, each in a process of its own.

    A line stays on the GPU of an earlier call, since the store may know results by it.
    """

    def __init__(self, options: argparse.Namespace, gpus: Sequence[str]) -> None:
        self._options, self._gpus = options, gpus
        self._end, self._stop = time.monotonic() + options.budget, threading.Event()
        self._lock = threading.Lock()
        self._earlier = {r["line"]: r["gpu"] for r in read(options.output, tiny=options.tiny) if "gpu" in r}

    def judge(self, lines: Sequence[str]) -> None:
        """Judge ``lines`` until the budget is spent."""
        waiting = deque(lines)
        with told_to_end(), ThreadPoolExecutor(len(self._gpus)) as threads:
            workers = [threads.submit(self._work, waiting, gpu) for gpu in self._gpus]
            try:
                for worker in workers:
                    worker.result()
            except BaseException:
                self._stop.set()
                raise

    def _work(self, waiting: deque[str], gpu: str) -> None:
        while not self._stop.is_set():
            left = self._end - time.monotonic()
            with self._lock:
                line = next((each for each in waiting if self._may_have(gpu, each)), None)
                if line is None:
                    return
                waiting.remove(line)
            if left > SPARE + 15:
                print(self._judged(line, gpu, left), end="", flush=True)

    def _may_have(self, gpu: str, line: str) -> bool:
        return self._earlier.get(line, gpu) == gpu or self._earlier[line] not in self._gpus

    def _judged(self, line: str, gpu: str, left: float) -> str:
        options = self._options
        words = [sys.executable, str(Path(__file__).resolve()), "--line", line, "--until", f"{time.time() + left:.1f}"]
        words += ["--most", f"{0.6 * options.budget:.1f}"]
        words += ["--output", str(options.output.resolve()), "--steps", ",".join(options.steps)]
        for name in ("minutes", "seconds", "limit", "rounds"):
            words += [f"--{name}", str(getattr(options, name))]
        cores = 1 if options.tiny else max(1, min(16, len(os.sched_getaffinity(0)) // len(self._gpus)))
        path = [str(ROOT), str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", "")]
        environment = {
            **({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}),
            "OMP_NUM_THREADS": str(cores),
            "TORCHINDUCTOR_COMPILE_THREADS": str(cores),
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join(each for each in path if each),
        }
        text = finished(
            words + (["--tiny"] if options.tiny else []), timeout=left, environment=environment, stop=self._stop
        )
        add_to(options.output / "log.txt", f"{_now()}  {line}: ended\n{_unexpected(text)}")
        return text if text.endswith("\n") else text + "\n"


def _unexpected(text: str) -> str:
    """Return the end of what a process said, if it failed."""
    return text[-3000:] + "\n" if "Traceback (most recent call last)" in text else ""


def _chosen(options: argparse.Namespace, parser: argparse.ArgumentParser) -> list[str]:
    known = load()
    lines = options.only or [*BUILDING, *HELD_OUT]
    if unknown := [name for name in lines if name not in known and name != "pde"]:
        parser.error(f"there is no module {unknown[0]!r}; the ten are: {', '.join([*BUILDING, *HELD_OUT])}")
    missing = {name: [p for p in known[name].needs if find_spec(p) is None] for name in lines if name in known}
    for name, packages in missing.items():
        if packages:
            print(f"{name}: left out, since {', '.join(packages)} is not installed")
    return [name for name in lines if not missing.get(name)]


def _steps(text: str) -> list[str]:
    steps = text.split(",")
    if unknown := [step for step in steps if step not in STEPS]:
        raise argparse.ArgumentTypeError(f"there is no step {unknown[0]!r}; they are {', '.join(STEPS)}")
    return [step for step in STEPS if step in steps]


def main() -> None:
    """Judge lines, or one of them here, or print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the folder; a later call continues with it")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these modules")
    parser.add_argument("--steps", type=_steps, default=[*STEPS], help="of grid,tune,final")
    parser.add_argument("--budget", type=float, default=540, help="seconds for this call; 540")
    parser.add_argument("--share", type=int, default=1, metavar="N", help="modules at once, each on a GPU of its own")
    parser.add_argument("--minutes", type=float, default=20, help="of tune for each module, all slices together; 20")
    parser.add_argument("--seconds", type=float, default=10, help="of measuring in a trial at most; 10")
    parser.add_argument("--limit", type=float, default=240, help="seconds after which a trial is killed; 240")
    parser.add_argument("--rounds", type=int, default=3, help="of the final; 3")
    parser.add_argument("--tiny", action="store_true", help="small sizes and the short grid, on the CPU")
    parser.add_argument("--report", action="store_true", help="only print the table")
    parser.add_argument("--line", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--most", type=float, help=argparse.SUPPRESS)  # that a final may wait for
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    if options.line:
        with Engine() as engine:
            Judge(options.line, options, engine).take(options.steps)
        return
    lines = _chosen(options, parser)
    if not options.report:
        gpus = places(1, tiny=options.tiny)[: options.share]
        if len(gpus) < (1 if options.tiny else options.share):
            parser.error(f"--share {options.share}, but there are {len(gpus)} GPUs; --tiny runs on the CPU")
        call = {"kind": "call", "tiny": options.tiny, "time": _now(), "command": sys.argv[1:], "commit": _commit()}
        call |= {"cards": _cards(), "versions": _versions()}
        add_to(options.output / "records.jsonl", json.dumps(call) + "\n")
        try:
            Lines(options, gpus).judge(lines)
        except (KeyboardInterrupt, Interrupted):
            sys.exit(130)
    print(report(read(options.output, tiny=options.tiny), lines))


if __name__ == "__main__":
    main()
