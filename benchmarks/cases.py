"""Running the cases of a benchmark, each in a process of its own, and keeping everything that came out.

A benchmark is a script with a function that takes a case's name and returns its figures as a dict. Called without
arguments it runs all its cases; `--cases a b` picks some; `--output DIR` keeps result.json, log.txt and env.txt there.
What an earlier call has left in that folder stays: results, log and environments are added to it.
"""

import argparse
import importlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from unittest.mock import patch

from processes import Interrupted, finished, portable, result_of

__all__ = [
    "add_to",
    "by_kind",
    "earlier",
    "environment",
    "keep",
    "left_on_device",
    "main",
    "prepare",
    "unloadable",
    "unmet_gpus",
]

SETTINGS = ("UPS_", "TORCHINDUCTOR_", "TORCH_COMPILE", "TRITON_", "NVTE_")  # variables that change what is measured
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
    cases: Mapping[str, Callable[[], dict[str, Any]]],
    *,
    columns: Sequence[str],
    timeout_s: int = 240,
    unmet: Callable[[Sequence[str]], str | None] | None = None,
) -> list[dict[str, Any]]:
    """Run ``cases``, each as a child of this script, print a table of ``columns``, and return what they found.

    ``unmet`` says of the cases that were chosen what they need and is not there; then none begins.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", help="run this one here, and print its figures as one line of JSON")
    parser.add_argument("--cases", nargs="+", default=list(cases), help="run only these, each in its own process")
    parser.add_argument("--output", type=Path, help="keep the raw output in this folder")
    parser.add_argument("--budget", type=float, default=540, help="seconds for everything: later cases are left out")
    options = parser.parse_args()
    if options.case:
        found = {"case": options.case, **cases[options.case]()}
        if os.environ.get("LOCAL_RANK", "0") == "0":  # the others of a case with several ranks know less
            print("\nRESULT " + json.dumps(found), flush=True)
        return []
    if unknown := [name for name in options.cases if name not in cases]:
        parser.error(f"there is no case {unknown[0]!r}; the cases are: {', '.join(map(repr, cases))}")
    if unmet is not None and (lacks := unmet(options.cases)):
        parser.error(lacks)
    if options.output:
        prepare(parser, options.output)
    return _run(options, columns=columns, timeout_s=timeout_s)


def _run(options: argparse.Namespace, *, columns: Sequence[str], timeout_s: float) -> list[dict[str, Any]]:
    start, results, failed = time.monotonic(), list[dict[str, Any]](), set[str]()
    before = earlier(options.output / "result.json") if options.output else []
    for name in options.cases:
        left = options.budget - (time.monotonic() - start)
        if name in failed:
            print(f"{name}: left out, it failed before", flush=True)
            continue
        if left < 30:
            print(f"{name}: left out, the budget of {options.budget:.0f} s is spent", flush=True)
            continue
        began, interrupted = time.monotonic(), None
        try:
            result, text = _child(name, timeout_s=min(timeout_s, left))
        except Interrupted as error:
            interrupted, text = error, error.said + "\ninterrupted"
            found = result_of(text)
            result = {"case": name, **({"error": "interrupted"} if "error" in found else found)}
        result["seconds_in_all"] = round(time.monotonic() - began, 1)
        results.append(result)
        print(json.dumps(result), flush=True)
        if options.output:
            keep(options.output / "result.json", [*before, *results])
            add_to(options.output / "log.txt", f"===== {name}\n{text}\n")
        if interrupted is not None:
            print(_table(results, ("case", *columns)), flush=True)
            raise interrupted
        if "error" in result:
            failed.add(name)
    print(_table(results, ("case", *columns)))
    return results


def _child(name: str, *, timeout_s: float) -> tuple[dict[str, Any], str]:
    text = finished([sys.executable, sys.argv[0], "--case", name], timeout=timeout_s)
    return {"case": name} | result_of(text) | {"case": name}, text  # a search tells of one of its trials


def prepare(parser: argparse.ArgumentParser, folder: Path) -> None:
    """Make ``folder``, and add to its env.txt what the figures depend on; whoever cannot write there is told so."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        known = folder / "env.txt"
        add_to(known, ("\n" if known.exists() else "") + environment())
    except OSError as error:
        parser.error(f"--output {folder} cannot be written ({error.strerror}): name another folder")


def add_to(path: Path, text: str) -> None:
    """Add ``text`` to a file."""
    with path.open("a") as file:
        file.write(text)


def keep(path: Path, results: Sequence[Mapping[str, Any]] | Mapping[str, Any]) -> None:
    """Write ``results``, or one, whole or not at all, whenever this process may end."""
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(results, indent=1) + "\n")
    beside.replace(path)


def earlier(path: Path) -> list[dict[str, Any]]:
    """Return the results that an earlier call has left; a file that is none of ours is put aside."""
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return []
    except ValueError:
        found = None
    if isinstance(found, list):
        return found
    path.replace(path.with_suffix(".unreadable"))
    return []


def by_kind(results: Iterable[Mapping[str, Any]], figure: str) -> dict[str, list[Any]]:
    """Return a figure of all runs that have it, by their case without its last word, which counts turns."""
    found: dict[str, list[Any]] = {}
    for result in results:
        if figure in result:
            found.setdefault(result["case"].rpartition(" ")[0], []).append(result[figure])
    return found


_NEEDED_GIB = {"8B": 80}  # of each GPU, by the model that some share: this one took 86 at least, on four with batch 1


def unmet_gpus(number: int, *, what: str, size: str = "") -> str | None:
    """Say that ``what`` needs GPUs that this machine does not have, or larger ones, for a model of that ``size``."""
    import torch

    there, gib = torch.cuda.device_count(), _NEEDED_GIB.get(size, 0)
    if there < number:
        return f"{what} needs {number} GPU{'s' * (number > 1)}, and this machine has {there}"
    if not gib:
        return None
    has = min(torch.cuda.get_device_properties(each).total_memory for each in range(number)) // 2**30
    return f"{what} needs {gib} GiB of each GPU, and these have {has}" if has < gib else None


def unloadable(module: str, *, what: str, load: Callable[[str], Any] = importlib.import_module) -> str | None:
    """Say that ``what`` needs a package that is not there, or that fails as it is imported, or by ``load``."""
    try:
        load(module)
    except Exception as error:  # noqa: BLE001  (a wheel for another CUDA raises whatever it likes)
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return f"{what} needs {module.partition('.')[0]}, which cannot be loaded ({portable(reason)})"
    return None


def environment() -> str:
    """Return what the figures depend on: command, settings, versions, device."""
    import torch

    words = ["python", *sys.orig_argv[1:]]
    settings = [f"{name}={_anywhere(value)}" for name, value in sorted(os.environ.items()) if name.startswith(SETTINGS)]
    lines = [f"command: {' '.join([*map(shlex.quote, settings), shlex.join(map(_anywhere, words))])}"]
    lines += [time.strftime("begun: %Y-%m-%d %H:%M:%S UTC", time.gmtime()), f"python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            lines.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            lines.append(f"{package} absent")
    if torch.cuda.is_available():
        lines += [f"{torch.cuda.device_count()} GPUs are visible", *_gpus()]
        lines.append(f"cuda {torch.version.cuda}, cudnn {_cudnn()}")
    else:
        lines.append(f"cpu, {os.cpu_count()} cores")
    return "\n".join(lines) + "\n"


def _cudnn() -> str:
    import torch

    try:
        return str(torch.backends.cudnn.version())
    except Exception as error:  # noqa: BLE001  (another release than torch's is loaded: the cases will tell)
        return f"unknown: {portable((str(error).splitlines() or [''])[0] or type(error).__name__)}"


def _anywhere(word: str) -> str:
    """Return a word of the command without the folders of this machine."""
    option, equals, value = word.partition("=")
    if equals and option.startswith("--"):
        return f"{option}={_anywhere(value)}"
    return Path(word).name if Path(word).is_absolute() else word


@cache
def _gpus() -> list[str]:
    # Not by torch: this process would hold memory of a GPU that the cases want whole.
    words = ["nvidia-smi", "--query-gpu=index,name,driver_version,memory.used,memory.total", "--format=csv,noheader"]
    if shutil.which(words[0]) is None:
        return ["GPUs unknown: there is no nvidia-smi"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return [f"GPUs unknown: {type(error).__name__}"]
    return [f"GPU {line}" for line in done.stdout.splitlines()]


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
