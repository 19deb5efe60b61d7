"""Measure how often `compare` finds an injected slowdown in real pairs of runs, and how often it raises a false alarm.

    python benchmarks/compare_pairs.py --output pairs.jsonl
    python benchmarks/compare_pairs.py --order interleaved --steps 1000 --width 1024 --rows 4096 --output pairs.jsonl

Half of the pairs are equal runs of a small model. In the other half, each step of the second run waits for 3 % of
its own time. With `--order sequential`, each run is a process of its own, and the second follows the first. With
`--order interleaved`, both runs take turns in one process after each step, so that both meet the same noise. The
device is the GPU if there is one. Each pair is one line of the output file, and a table is printed at the end. Called
again with the same file, the script makes the pairs that are missing; --budget ends a call early.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

WARMUP = 5  # steps that are not written


def one_step(device: torch.device, *, width: int, rows: int) -> Callable[[], None]:
    """Return a function that trains a small model by one step and waits for the device."""
    torch.manual_seed(0)
    layers = [
        layer for _ in range(4) for layer in (nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
    ]
    model = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(rows, width, device=device)

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return step


def timed(steps: Sequence[Callable[[], None]], slower: Sequence[float], *, count: int) -> list[list[float]]:
    """Return the seconds of each step of runs that take turns, each slower by a share of its own steps."""
    found = [list[float]() for _ in steps]
    runs = [*zip(steps, slower, found, strict=True)]
    for turn in range(WARMUP + count):
        for step, share, seconds in runs if turn % 2 else reversed(runs):  # none is always the first
            start = time.perf_counter()
            step()
            end = start + (1 + share) * (time.perf_counter() - start)
            while time.perf_counter() < end:  # a sleep takes some 0.1 ms longer than asked
                pass
            seconds.append(time.perf_counter() - start)
    return [seconds[WARMUP:] for seconds in found]


def write(folder: Path, seconds: Sequence[float]) -> Path:
    """Write step times as `TokenThroughput` does."""
    folder.mkdir(parents=True)
    lines = [f"{step},{1e3 * each:.6g}\n" for step, each in enumerate(seconds)]
    (folder / "step_times.csv").write_text("".join(["step,step_ms\n", *lines]))
    return folder


def pair(folder: Path, asked: argparse.Namespace, slower: float) -> list[Path]:
    """Make two runs, the second slower by a share, and return their folders."""
    folders, shares = [folder / "base", folder / "new"], [0.0, slower]
    if asked.order == "interleaved":
        both = [one_step(torch.device(asked.device), width=asked.width, rows=asked.rows) for _ in shares]
        for each, seconds in zip(folders, timed(both, shares, count=asked.steps), strict=True):
            write(each, seconds)
        return folders
    for each, share in zip(folders, shares, strict=True):
        options = {"child": each, "slower": 100 * share} | {
            name: getattr(asked, name) for name in ("steps", "device", "width", "rows", "threads")
        }
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        subprocess.run([sys.executable, __file__, *words], check=True)
    return folders


def judged(folders: Sequence[Path]) -> dict[str, Any]:
    """Return what `compare` and `gate` say about a pair."""
    from lightning_ups.insight.compare import STEP, Side, effects, gate, read_run  # seconds that no child needs

    base, new = (Side(each.name, [read_run(str(each))]) for each in folders)
    effect = next(each for each in effects(base, new) if each.name == STEP)
    found = effect.difference
    return {
        "step_ms": 1e3 * effect.base,
        "difference": found.value,
        "low": found.low,
        "high": found.high,
        "verdict": effect.verdict,
        "gate": gate(base, new, slower=None, loss=None, metric=None).verdict,
    }


def main() -> None:
    """Make the pairs, and print how many were found."""
    asked = _asked()
    torch.set_num_threads(asked.threads)
    if asked.child:
        step = one_step(torch.device(asked.device), width=asked.width, rows=asked.rows)
        write(asked.child, timed([step], [asked.slower / 100], count=asked.steps)[0])
        return
    end = time.monotonic() + asked.budget
    with tempfile.TemporaryDirectory() as name:
        folder = asked.keep or Path(name)
        results = _earlier(asked)
        for index in range(len(results), 2 * asked.pairs):
            if time.monotonic() > end:
                print(f"left: {2 * asked.pairs - index} pairs")
                break
            kind = ("slower", "equal")[index % 2]
            found = judged(pair(folder / f"pair_{index}", asked, asked.slower / 100 if kind == "slower" else 0.0))
            results.append({"pair": index, "kind": kind, **_setup(asked), **found})
            with asked.output.open("a") as file:
                file.write(json.dumps(results[-1]) + "\n")
    print(table(results))


def _setup(asked: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(asked, name) for name in ("order", "device", "steps", "width", "rows", "slower")}


def _earlier(asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the pairs of the output file that were made in the same way."""
    lines = asked.output.read_text().splitlines() if asked.output.exists() else []
    return [each for each in map(json.loads, lines) if _setup(asked).items() <= each.items()]


def table(results: Sequence[dict[str, Any]]) -> str:
    """Return one line for each pair, and the two counts."""
    lines = [
        f"{each['pair']:4}  {each['kind']:6}  {100 * each['difference']:+6.2f} %"
        f"  ({100 * each['low']:+.2f} to {100 * each['high']:+.2f})  {each['verdict']:11}  {each['gate']}"
        for each in results
    ]
    for kind, what in (("slower", "slowdowns found"), ("equal", "false alarms")):
        verdicts = [each["verdict"] for each in results if each["kind"] == kind]
        lines.append(f"{what}: {verdicts.count('significant')} of {len(verdicts)}")
    return "\n".join(lines)


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=10, help="of each kind")
    parser.add_argument("--steps", type=int, default=600, help="of each run")
    parser.add_argument("--slower", type=float, default=3.0, help="percent of a step that the second run waits")
    parser.add_argument("--order", choices=("sequential", "interleaved"), default="sequential")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--budget", type=float, default=540, help="seconds after which no pair begins; 540")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU")
    parser.add_argument("--keep", type=Path, help="keep the step times of all runs in this folder")
    parser.add_argument("--output", type=Path, default=Path("compare_pairs.jsonl"), help="JSON lines, appended")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
