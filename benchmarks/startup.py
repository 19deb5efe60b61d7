"""Seconds from `fit` to the end of the first step, cold and warm, of the zoo's lines.

    python benchmarks/startup.py --only smp_unet vit_mae --share 2 --deadline 480 --output startup.jsonl
    python benchmarks/startup.py --report startup.jsonl

A cold start has an empty folder of compiled programs, a warm one the folder that the cold one left. Each is a process
of its own, with the compiling processes that torch starts by default, or its share of the processor's cores if several
run at once (--share). The record has the seconds by torch's own clocks, which contain one another, and what torch found
in its caches: graphs differentiated before (`aot_autograd`), and programs (`inductor`).
"""

import argparse
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from cases import add_to
from processes import ROOT, finished, result_of, told_to_end
from zoo import places
from zoo_modules import LINES, load
from zoo_run import SIDES, run

KINDS = ("cold", "warm")
SHOWN = 12  # of torch's clocks


def start(name: str, side: str, *, tiny: bool, limit: float) -> dict[str, Any]:
    """Train three steps in this process, and return what the first waited for."""
    from torch._dynamo.utils import compilation_time_metrics, counters  # noqa: TID251

    warnings.simplefilter("ignore")
    found = run(LINES[name], replace(SIDES[side], steps=3), tiny=tiny, limit=limit, blocks=(2, 0.0))
    seconds = sorted(((sum(times), name) for name, times in compilation_time_metrics.items()), reverse=True)
    found["seconds_by_torch"] = {name: round(value, 2) for value, name in seconds[:SHOWN]}
    found["caches"] = {
        kind: {what: number for what, number in counters[kind].items() if "cache" in what}
        for kind in ("aot_autograd", "inductor")
    }
    return found


def pair(name: str, side: str, gpus: str, options: argparse.Namespace, end: float) -> None:
    """Record a cold start and a warm one, as far as there is time."""
    words = [sys.executable, str(Path(__file__).resolve()), "--run", name, side, "--limit", str(options.limit)]
    with tempfile.TemporaryDirectory() as folder:
        environment = {"CUDA_VISIBLE_DEVICES": gpus, "TORCHINDUCTOR_CACHE_DIR": folder, "HF_HUB_OFFLINE": "1"}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        if options.share > 1:
            cores = str(max(1, len(os.sched_getaffinity(0)) // options.share))
            environment |= {"TORCHINDUCTOR_COMPILE_THREADS": cores, "OMP_NUM_THREADS": cores}
        for kind in KINDS:
            if (left := end - time.monotonic()) < 1:
                return
            text = finished([*words, *(["--tiny"] if options.tiny else [])], timeout=left, environment=environment)
            found = result_of(text)
            record = {"line": name, "side": side, "kind": kind, "share": options.share, "tiny": options.tiny, **found}
            add_to(options.output, json.dumps(record) + "\n")
            print(f"{name} {side} {kind}: {found.get('first_step_s', found.get('error'))} s", flush=True)
            if "first_step_s" not in found:
                return


def report(records: Iterable[Mapping[str, Any]]) -> str:
    """Return a table with a row for each line and side."""
    rows = dict[tuple[str, str], dict[str, Any]]()
    for record in records:
        rows.setdefault((record["line"], record["side"]), {})[record["kind"]] = record
    lines = ["| line | side | cold s | warm s | programs compiled cold | warm |", "|---|---|---|---|---|---|"]
    for (line, side), kinds in rows.items():
        first = [str(kinds.get(kind, {}).get("first_step_s", "")) for kind in KINDS]
        missed = [
            str(kinds[kind].get("caches", {}).get("inductor", {}).get("fxgraph_cache_miss", 0)) if kind in kinds else ""
            for kind in KINDS
        ]
        lines.append(f"| {line} | {side} | {' | '.join([*first, *missed])} |")
    return "\n".join(lines)


def main() -> None:
    """Make one start, or all, or the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", default=["smp_unet", "vit_mae"], help="lines of the zoo")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=["stock_compile", "preset"], metavar="SIDE")
    parser.add_argument("--share", type=int, default=1, metavar="N", help="starts that share a GPU")
    parser.add_argument("--deadline", type=float, default=480, help="seconds for everything")
    parser.add_argument("--limit", type=float, default=300, help="seconds that one start may take")
    parser.add_argument("--tiny", action="store_true", help="small sizes, on the CPU")
    parser.add_argument("--output", type=Path, default=Path("startup.jsonl"), help="the file of records")
    parser.add_argument("--report", type=Path, metavar="FILE", help="print a table of these records")
    parser.add_argument("--run", nargs=2, metavar=("NAME", "SIDE"), help="make one start here, and print its record")
    options = parser.parse_args()
    load()
    if options.run:
        found = start(*options.run, tiny=options.tiny, limit=options.limit)
        print("\nRESULT", json.dumps(found))
        return
    if options.report is None:
        if unknown := {*options.only} - LINES.keys():
            parser.error(f"there is no line {', '.join(sorted(unknown))}")
        end, free = time.monotonic() + options.deadline, SimpleQueue[str]()
        at = [gpus for gpus in places(1, tiny=options.tiny) for _ in range(options.share)]
        for gpus in at:
            free.put(gpus)

        def one(name: str, side: str) -> None:
            gpus = free.get()
            try:
                pair(name, side, gpus, options, end)
            finally:
                free.put(gpus)

        with told_to_end(), ThreadPoolExecutor(len(at)) as threads:
            jobs = [threads.submit(one, name, side) for name in options.only for side in options.sides]
        for job in jobs:
            job.result()
    file = options.report or options.output
    print(report(json.loads(line) for line in file.read_text().splitlines()))


if __name__ == "__main__":
    main()
