"""What do checksums cost when a checkpoint is saved and loaded?

Two trees of this package take turns in processes of their own: the one of `--before`, such as a git worktree of the
commit before checksums, and this one. Each process holds `--gigabytes` of tensors in host memory and saves them to
`--folder`: at once, in the background, and loads them. The figures are seconds:

- `sync`: a synchronous save, for which training waits;
- `blocked`: how long a save in the background stops training, the first one left out, which also makes its buffer;
- `background`: until that save is whole;
- `load`: reading all tensors into memory;
- `sync_cpu`, `load_cpu`: seconds of all cores in `sync` and `load`, which other processes disturb less.

Minima over all turns are compared, since other processes may share the machine.

    git worktree add /tmp/before COMMIT
    python benchmarks/checkpoint_checksums.py --before /tmp/before --folder /dev/shm --output DIR
    python benchmarks/checkpoint_checksums.py --rates --output DIR

The second command compares checksums by GB/s on one core, in pieces of one MiB: of 512 MB in memory, and of one piece
that stays in the cache.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ("sync", "sync_cpu", "blocked", "background", "load", "load_cpu")


def main() -> None:
    """Run both trees by turns, or be one of the processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="a tree of the package without checksums")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="where checkpoints go")
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument(
        "--threads", type=int, help="files that are written and read at once; default: one for each core"
    )
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("checkpoint_checksums"))
    parser.add_argument("--rates", action="store_true", help="compare checksums by their speed")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        print("RESULT " + json.dumps(_measure(Path(asked.child), asked.gigabytes, asked.threads)))
        return
    if asked.rates:
        asked.output.mkdir(parents=True, exist_ok=True)
        (asked.output / "rates.json").write_text(json.dumps(_rates(), indent=1) + "\n")
        return
    if asked.before is None:
        parser.error("--before is missing: name a tree of the package without checksums")
    asked.output.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[dict[str, float]]] = {"before": [], "after": []}
    with (asked.output / "results.jsonl").open("a") as file:
        for turn in range(asked.turns):
            for side, tree in [("before", asked.before), ("after", ROOT)][:: 1 if turn % 2 == 0 else -1]:
                result = _child(tree, asked)
                found[side].append(result)
                line = {
                    "side": side,
                    "turn": turn,
                    "folder": str(asked.folder),
                    "gigabytes": asked.gigabytes,
                    "threads": asked.threads,
                }
                line |= result
                print(json.dumps(line), flush=True)
                print(json.dumps(line), file=file, flush=True)
    versions = {"torch": version("torch"), "python": platform.python_version(), "cores": os.cpu_count()}
    (asked.output / "env.txt").write_text(json.dumps(versions, indent=1) + "\n")
    for name in FIGURES:
        before, after = (min(result[name] for result in found[side]) for side in ("before", "after"))
        print(f"{name}: {before:.3f} s before, {after:.3f} s after, {after / before - 1:+.1%}")


def _rates() -> dict[str, dict[str, float]]:
    import hashlib
    import zlib

    from lightning_ups.transforms.checkpoint.checksums import CHUNK, checksum

    functions = {
        "ours": checksum,
        "zlib.crc32": zlib.crc32,
        "zlib.adler32": zlib.adler32,
        "sha256": lambda piece: hashlib.sha256(piece).digest(),
        "blake2b": lambda piece: hashlib.blake2b(piece).digest(),
    }
    if find_spec("xxhash") is not None:
        functions["xxhash.xxh3_64"] = import_module("xxhash").xxh3_64_intdigest
    data = memoryview(os.urandom(2**29))
    pieces = [data[start : start + CHUNK] for start in range(0, len(data), CHUNK)]
    found = {}
    for name, function in functions.items():
        memory = min(_seconds(function, pieces) for _ in range(3)) / len(data)
        cache = min(_seconds(function, pieces[:1] * 50) for _ in range(3)) / (50 * CHUNK)
        found[name] = {"from_memory_GB_s": round(1e-9 / memory, 2), "from_cache_GB_s": round(1e-9 / cache, 2)}
        print(name, found[name], flush=True)
    return found


def _seconds(function: Callable[[memoryview], Any], pieces: Iterable[memoryview]) -> float:
    start = time.perf_counter()
    for piece in pieces:
        function(piece)
    return time.perf_counter() - start


def _child(tree: Path, asked: argparse.Namespace) -> dict[str, float]:
    folder, threads = tempfile.mkdtemp(dir=asked.folder), ["--threads", str(asked.threads)] if asked.threads else []
    try:
        done = subprocess.run(
            [sys.executable, __file__, "--child", folder, "--gigabytes", str(asked.gigabytes), *threads],
            env=os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    finally:
        shutil.rmtree(folder)
    [line] = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return json.loads(line.removeprefix("RESULT "))


def _measure(folder: Path, gigabytes: float, threads: int | None) -> dict[str, float]:
    import torch

    from lightning_ups.transforms.checkpoint import Saver
    from lightning_ups.transforms.checkpoint.reading import FolderReader, read_into

    rows = 4096
    count = max(2, round(gigabytes * 1e9 / (rows * rows * 4)))
    state: dict[str, Any] = {"state_dict": {f"w{n}": torch.randn(rows, rows) for n in range(count)}}
    path, found = folder / "last", {name: float("inf") for name in FIGURES}
    saver = Saver(asynchronous=False, threads=threads)
    for _ in range(2):
        shutil.rmtree(path, ignore_errors=True)
        start = time.process_time()
        saver.save(state, files={"meta.pt": b"meta"}, path=path)
        assert saver.last is not None
        found["sync_cpu"] = min(found["sync_cpu"], time.process_time() - start)
        found["sync"] = min(found["sync"], saver.last.blocked_s)
    saver.close()
    for _ in range(2):
        start, cpu = time.perf_counter(), time.process_time()
        targets = {f"state_dict.{name}": value for name, value in state["state_dict"].items()}
        read_into(targets, FolderReader(path, threads=threads))
        found["load"] = min(found["load"], time.perf_counter() - start)
        found["load_cpu"] = min(found["load_cpu"], time.process_time() - cpu)
    saver = Saver(asynchronous=True, threads=threads)
    for number in range(2):
        shutil.rmtree(path, ignore_errors=True)
        saver.save(state, files={"meta.pt": b"meta"}, path=path)
        blocked = saver.last
        assert blocked is not None
        saver.wait()
        if number:
            found["blocked"] = blocked.blocked_s
            found["background"] = (saver.last or blocked).total_s or 0.0
    saver.close()
    return found


if __name__ == "__main__":
    main()
