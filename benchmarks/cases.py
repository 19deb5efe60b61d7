"""Running the cases of a benchmark, each in a process of its own, and keeping everything that came out.

A benchmark is a script with a function that takes a case's name and returns its figures as a dict. Called without
arguments it runs all its cases; `--cases a b` picks some; `--output DIR` keeps result.json, log.txt and env.txt there.
"""

import argparse
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from unittest.mock import patch

from processes import finished, result_of

__all__ = ["environment", "left_on_device", "main"]

PACKAGES = (
    "torch",
    "lightning",
    "torchao",
    "transformers",
    "transformer-engine",
    "flash-attn-4",
    "triton",
    "jsonargparse",
)


def main(
    cases: Mapping[str, Callable[[], dict[str, Any]]], *, columns: Sequence[str], timeout_s: int = 240
) -> list[dict[str, Any]]:
    """Run ``cases``, each as a child of this script, print a table of ``columns``, and return what they found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", help="run this one here, and print its figures as one line of JSON")
    parser.add_argument("--cases", nargs="*", default=list(cases), help="run only these, each in its own process")
    parser.add_argument("--output", type=Path, help="keep the raw output in this folder")
    parser.add_argument("--budget", type=float, default=540, help="seconds for everything: later cases are left out")
    options = parser.parse_args()
    if options.case:
        found = {"case": options.case, **cases[options.case]()}
        if os.environ.get("LOCAL_RANK", "0") == "0":  # the others of a case with several ranks know less
            print("\nRESULT " + json.dumps(found), flush=True)
        return []
    start, results, log = time.monotonic(), [], []
    for name in options.cases:
        left = options.budget - (time.monotonic() - start)
        if left < 30:
            print(f"{name}: left out, the budget of {options.budget:.0f} s is spent", flush=True)
            continue
        began = time.monotonic()
        result, text = _child(name, timeout_s=min(timeout_s, left))
        result["seconds_in_all"] = round(time.monotonic() - began, 1)
        results.append(result)
        log.append(f"===== {name}\n{text}")
        print(json.dumps(result), flush=True)
        if options.output:
            _keep(options.output, results, log)
    print(_table(results, ("case", *columns)))
    return results


def _child(name: str, *, timeout_s: float) -> tuple[dict[str, Any], str]:
    text = finished([sys.executable, sys.argv[0], "--case", name], timeout=timeout_s)
    return {"case": name, **result_of(text)}, text


def _keep(folder: Path, results: Sequence[Mapping[str, Any]], log: Sequence[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").write_text(json.dumps(results, indent=1) + "\n")
    (folder / "log.txt").write_text("\n".join(log))
    (folder / "env.txt").write_text(environment())


def environment() -> str:
    """Return what the figures depend on: command, versions, device."""
    import torch

    words = [
        Path(word).name if Path(word).is_absolute() else word for word in sys.argv
    ]  # not where this machine has it
    lines = [f"command: python {shlex.join(words)}", f"python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            lines.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            lines.append(f"{package} absent")
    if torch.cuda.is_available():
        lines.append(f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}")
        lines.append(f"cuda {torch.version.cuda}, cudnn {torch.backends.cudnn.version()}")
    else:
        lines.append(f"cpu, {os.cpu_count()} cores")
    return "\n".join(lines) + "\n"


@contextmanager
def left_on_device(module: Any) -> Iterator[None]:
    """Leave ``module`` and the state of its optimizers where they are after a fit.

    Lightning brings all of it to the host, which may take longer than the training, and more memory than there is.
    What is fitted next in the same process finds the room taken until the module is gone.
    """
    module.cpu = lambda: module
    with patch("lightning.pytorch.strategies.strategy._optimizers_to_device"):
        yield


def _table(results: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    rows = [
        columns,
        ["---"] * len(columns),
        *([str(r.get(c, r.get("error", "")[:40])) for c in columns] for r in results),
    ]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
