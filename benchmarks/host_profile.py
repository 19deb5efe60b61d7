"""Where the milliseconds of the host go in a step: ours beside a loop by hand.

    python benchmarks/host_profile.py --row 150M-4 --sides ours "bare, graphs" --output OUT
    python benchmarks/host_profile.py --row tiny --sides ours bare     # on a CPU: tries it out

Each side of a row of llama.py runs in a process of its own, first for 60 steps as it is, and then for 40 under Python's
profiler, which makes Python slower and what torch does not. Of the first are told the time of a step by the clock, and
the time that the thread which trains was on a processor, and all threads of the process: a backward has Python of its
own, in autograd's thread, which the profiler does not see and tells as time of `run_backward`. A host that is faster
than its device does not wait for it, as long as the device's queue has room; hence the tenth of the steps that were
fastest is told beside the median. Of a step's parts is told what they take by the clock, those inside others with them.
"""

import argparse
import cProfile
import io
import json
import pstats
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from cases import add_to, prepare, unmet_gpus
from llama import ALLOCATOR, SIDES, Marks, rows, tell, work
from processes import Interrupted, finished, portable, result_of

from lightning_ups.models.gpt import GPTModule
from lightning_ups.optim import MasteredOptimizer, MasterWeights
from lightning_ups.transforms.compile import OwnGradients

PLAIN, PROFILED, SHOWN = 60, 40, 45
PARTS = {
    "training step": (GPTModule, "training_step"),
    "backward": (torch.Tensor, "backward"),
    "replay of graphs": (torch.cuda.CUDAGraph, "replay"),
    "own gradients": (OwnGradients, "take"),
    "clip's gradients": (MasteredOptimizer, "gradients"),
    "writes of others": (MasterWeights, "take_over"),
    "optimizer's kernel": (MasteredOptimizer, "_step_in_one_kernel"),
}


class Stopwatch:
    """Takes the times between steps, and then a profile of some more, and ends the process."""

    def __init__(self, *, first: int) -> None:
        self._step, self._first = -1, first
        self._times: list[tuple[float, float, float]] = []
        self._parts: dict[str, list[float]] = defaultdict(list)  # of each step, in seconds
        self._profile = cProfile.Profile()

    def begin_step(self) -> None:
        """Take it that a step begins."""
        self._step += 1
        passed = self._step - self._first
        if 0 <= passed <= PLAIN:
            self._times.append((time.perf_counter(), time.thread_time(), time.process_time()))
        for spent in self._parts.values():
            spent.append(0.0)
        if passed == PLAIN:
            self._profile.enable()
        if passed == PLAIN + PROFILED:
            self._profile.disable()
            tell(self._found())

    @contextmanager
    def times_parts(self) -> Iterator[None]:
        """Time what the steps consist of, while the context is open."""
        with ExitStack() as undo:
            for part, (owner, name) in PARTS.items():
                undo.enter_context(patch.object(owner, name, self._timed(part, getattr(owner, name))))
            yield

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                if spent := self._parts[part]:
                    spent[-1] += time.perf_counter() - start
                else:
                    spent.append(0.0)  # the step that it is first seen in is no whole one

        return timed

    def _found(self) -> dict[str, Any]:
        pairs = [*zip(self._times, self._times[1:], strict=False)]
        spans = [[1e3 * (b[i] - a[i]) for a, b in pairs] for i in range(3)]
        names = ("step_ms", "thread_ms", "process_ms")
        medians = {name: round(statistics.median(each), 3) for name, each in zip(names, spans, strict=True)}
        fastest = [round(statistics.median(sorted(each)[: max(1, PLAIN // 10)]), 3) for each in spans]
        tenth = dict(zip((f"{name}_fastest" for name in names), fastest, strict=True))
        # The last belong to the step that now begins, to those under the profiler, and to it the ones before.
        parts = {part: spent[-1 - PROFILED - PLAIN : -1 - PROFILED] for part, spent in self._parts.items()}
        told = {part: round(1e3 * statistics.median(spent), 3) for part, spent in parts.items() if spent}
        all_of_them = [round(step, 2) for step in spans[0]]
        return {
            **medians,
            **tenth,
            "parts_ms": told,
            "step_ms_all": all_of_them,
            "profile": {order: self._table(order) for order in ("tottime", "cumulative")},
        }

    def _table(self, order: str) -> str:
        text = io.StringIO()
        pstats.Stats(self._profile, stream=text).sort_stats(order).print_stats(SHOWN)
        return portable(text.getvalue())


def profiled(name: str, side: str) -> None:
    """Run one side of a row in this process, and tell what was found."""
    row = rows()[name]
    stopwatch = Stopwatch(first=row.warmup)
    with patch.object(Marks, "set", lambda _: stopwatch.begin_step()), stopwatch.times_parts():
        work(SIDES[side], replace(row, steps=row.warmup + PLAIN + PROFILED + 1))


def main() -> None:
    """Profile sides of a row and print what they take."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", choices=rows(), required=True, help="of llama.py")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=["ours", "bare"])
    parser.add_argument("--output", type=Path, default=Path("runs/host_profile"))
    parser.add_argument("--budget", type=float, default=150, help="seconds for each side")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        profiled(options.row, options.side)
        return
    row = rows()[options.row]
    if row.gpus > 1:
        parser.error(f"row {options.row} is of {row.gpus} GPUs, and this profiles one process")
    if "tiny" not in options.row and (lacks := unmet_gpus(1, what=f"row {options.row}", size=row.size)):
        parser.error(lacks)
    prepare(parser, options.output)
    results = [of_side(options.row, side, options.output, budget=options.budget) for side in options.sides]
    print(table([result for result in results if result is not None]))
    if None in results:
        sys.exit(1)


def of_side(name: str, side: str, output: Path, *, budget: float) -> dict[str, Any] | None:
    """Run one side in a process of its own, and keep what it found."""
    command = [sys.executable, __file__, "--row", name, "--side", side]
    try:
        said = finished(command, timeout=budget, environment=ALLOCATOR)
    except Interrupted as error:
        add_to(output / "log.txt", f"===== {side}, interrupted\n{error.said}\n")
        raise
    result = result_of(said)
    add_to(output / "log.txt", f"===== {side}\n{said.partition('RESULT ')[0]}\n")
    if "error" in result:
        print(f"{side}: {result['error']}", file=sys.stderr)
        return None
    tables = result.pop("profile")
    for order, text in tables.items():
        (output / f"{side.replace(', ', '_').replace(' ', '_')}_{order}.txt").write_text(text)
    result = {"row": name, "side": side, **result}
    add_to(output / "results.jsonl", json.dumps(result) + "\n")
    return result


def table(results: Sequence[dict[str, Any]]) -> str:
    """Return the times of the sides as a table, and then of their parts."""
    times = [f"{name}_ms{tail}" for name in ("step", "thread", "process") for tail in ("", "_fastest")]
    heads = ["a step, ms", "its thread on a processor", "all threads"]
    lines = ["| side |" + "".join(f" {head} | of the fastest |" for head in heads), "|" + "---|" * (1 + len(times))]
    lines += [f"| {r['side']} | " + " | ".join(str(r[name]) for name in times) + " |" for r in results]
    lines += [
        "",
        "| part, ms a step |" + "".join(f" {r['side']} |" for r in results),
        "|" + "---|" * (1 + len(results)),
    ]
    for part in PARTS:
        lines.append(f"| {part} |" + "".join(f" {r['parts_ms'].get(part, '')} |" for r in results))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
