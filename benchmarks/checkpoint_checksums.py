"""What do checksums cost when a checkpoint is saved and loaded?

One process holds a model and the state of AdamW, on the GPU if there is one: 18 GB in all. It saves and loads them by
turns with checksums and without. Without them, the package writes and reads as it did before it had any: four of its
functions are replaced. First in --folder, which should be memory, the fastest target there is; then --disk-gigabytes of
them in --disk, where files are written through to the disk, and read from it and not from the cache of the system.

- `sync_s`: a synchronous save, for which training waits;
- `blocked_s`: how long a save in the background stops training;
- `background_s`: until that save is whole;
- `load_s`: reading everything back to where it came from;
- `sync_cpu_s`, `load_cpu_s`: seconds of all cores meanwhile.

The first round, which pins memory, is left out unless it is the only one. The summary has the medians of both sides,
and the median of their ratio in each round: 1.05 is 5 % more with checksums.

    python benchmarks/checkpoint_checksums.py --output DIR
    python benchmarks/checkpoint_checksums.py --saves 30 --output DIR
    python benchmarks/checkpoint_checksums.py --loads 20 --output DIR
    python benchmarks/checkpoint_checksums.py --loads 20 --breakdown --output DIR
    python benchmarks/checkpoint_checksums.py --rates --output DIR

The second command only measures synchronous saves, to --folder.

The third one saves once, to --folder, and loads in that many rounds, by turns with checksums and without. A
third side, `unverified`, reads the file of checksums and what surrounds each tensor, as with checksums, but verifies no
bytes of tensors. Checksums tell which tensors are of one kind, so that torch parses each kind once: `with` against
`unverified` is what verifying costs, and `with` against `without` includes what is gained there. The order of the three
changes from round to round.

--breakdown adds the seconds of all lanes in each part of a load, and during how many of them a core was at work, which
may be waiting for a GPU. A part within another one counts once. It costs some microseconds for each part, on all sides.
One thread runs `verify` when all lanes have read their share.

The last command compares checksums by GB/s on one core, in pieces of one MiB: of 512 MB in memory, and of one piece
that stays in the cache.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from itertools import permutations
from pathlib import Path
from typing import Any
from unittest.mock import patch

from cases import environment

FIGURES = ("sync_s", "blocked_s", "background_s", "load_s", "sync_cpu_s", "load_cpu_s")
IN_FOLDER = 0.65  # of the budget; the rest is for the disk
LEAST = 0.2  # seconds of --budget that are kept for the end, for each GB: memory is given back
SIDES = ("without", "unverified", "with")
Folder = dict[str, Any]


def main() -> None:
    """Measure both sides by turns, and print JSON and a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="memory")
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()), help="a folder on a disk")
    parser.add_argument("--gigabytes", type=float, default=18.0)
    parser.add_argument("--disk-gigabytes", type=float, default=3.0, help="0 leaves the disk out")
    parser.add_argument("--rounds", type=int, default=8, help="at most, as --budget allows")
    parser.add_argument("--budget", type=float, default=240.0, help="seconds for everything")
    parser.add_argument("--device", help="cuda or cpu; default: cuda if there is one")
    parser.add_argument("--threads", type=int, help="files written and read at once; default: as the package chooses")
    parser.add_argument("--output", type=Path, default=Path("checkpoint_checksums"))
    parser.add_argument("--saves", type=int, metavar="N", help="only save, in N rounds, as --budget allows")
    parser.add_argument("--loads", type=int, metavar="N", help="only load, in N rounds, as --budget allows")
    parser.add_argument("--breakdown", action="store_true", help="with --loads: seconds of each part of a load")
    parser.add_argument("--rates", action="store_true", help="compare checksums by their speed")
    asked = parser.parse_args()
    places = [(asked.folder, asked.gigabytes), (asked.disk, asked.disk_gigabytes)]
    for folder, gigabytes in places[: 0 if asked.rates else 2]:
        if not folder.is_dir() or shutil.disk_usage(folder).free < 1.1e9 * gigabytes:
            parser.error(f"{folder} needs {1.1 * gigabytes:.1f} GB of free space")
    asked.output.mkdir(parents=True, exist_ok=True)
    (asked.output / "env.txt").write_text(environment())
    if asked.rates:
        (asked.output / "rates.json").write_text(json.dumps(_rates(), indent=1) + "\n")
        return
    if asked.saves:
        asked.rounds, asked.disk_gigabytes = asked.saves, 0.0
    summary = (_measure_loads if asked.loads else _measure)(asked, time.monotonic())
    (asked.output / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print("SUMMARY " + json.dumps(summary), flush=True)
    for name, found in summary.items():
        print(f"{name}, {found['gigabytes']:.1f} GB, {found['rounds']} rounds:")
        for figure in (figure for figure in FIGURES if figure in found):
            one = found[figure]
            base = next(iter(one))
            print(
                f"  {figure:12} {one[base]:8.3f} {base}, {one['with']:8.3f} with,"
                f" {one['ratio'] - 1:+6.1%} ({one['least'] - 1:+.1%} to {one['most'] - 1:+.1%})"
            )
        for part, sides in found.get("parts", {}).items():
            print(
                f"  {part:18}", *(f"{side} {seconds:7.3f} (cpu {cpu:7.3f})" for side, (seconds, cpu) in sides.items())
            )


def _rates() -> dict[str, dict[str, float]]:
    import hashlib
    import zlib

    from lightning_ups.state.checkpoint.checksums import CHUNK, checksum

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


def _measure(asked: argparse.Namespace, start: float) -> dict[str, Any]:
    import torch

    device = asked.device or ("cuda" if torch.cuda.is_available() else "cpu")
    state = _state(asked.gigabytes, device)
    part, nbytes = dict[str, Any](), 0
    for name, tensor in state.items():
        if nbytes < 1e9 * asked.disk_gigabytes:
            part[name], nbytes = tensor, nbytes + tensor.nbytes
    end = start + asked.budget - LEAST * asked.gigabytes
    ends = (start + IN_FOLDER * asked.budget if asked.disk_gigabytes else end), end
    places = [("memory", asked.folder, state, ends[0]), ("disk", asked.disk, part, ends[1])]
    summary = dict[str, Any]()
    with (asked.output / "results.jsonl").open("a") as file:
        for name, folder, tensors, end in places:
            if not tensors:
                continue
            rounds = list[dict[str, Folder]]()
            for one in _rounds(asked, folder, tensors, end):
                rounds.append(one)
                for side, figures in one.items():
                    line = json.dumps({"place": name, "round": len(rounds) - 1, "side": side} | figures)
                    print(line, flush=True)
                    print(line, file=file, flush=True)
            gigabytes = sum(tensor.nbytes for tensor in tensors.values()) / 1e9
            summary[name] = {"gigabytes": gigabytes, "device": device} | _compared(rounds[1:] or rounds)
    return summary


def _measure_loads(asked: argparse.Namespace, start: float) -> dict[str, Any]:
    import torch

    from lightning_ups.state.checkpoint import Saver

    device = asked.device or ("cuda" if torch.cuda.is_available() else "cpu")
    state, rounds, orders = _state(asked.gigabytes, device), list[dict[str, Folder]](), [*permutations(SIDES)]
    root = Path(tempfile.mkdtemp(dir=asked.folder))
    saver = Saver(asynchronous=False, threads=asked.threads)
    try:
        saver.save({"state_dict": state}, files={"meta.pt": b"meta"}, path=root / "sync")
        with (asked.output / "results.jsonl").open("a") as file:
            while len(rounds) <= asked.loads and time.monotonic() < start + asked.budget:
                found = {
                    side: _load(root / "sync", state, asked.threads, side=side, breakdown=asked.breakdown)
                    for side in orders[len(rounds) % len(orders)]
                }
                rounds.append(found)
                line = json.dumps({"round": len(rounds) - 1} | found)
                print(line, flush=True)
                print(line, file=file, flush=True)
    finally:
        saver.close()
        shutil.rmtree(root)
    gigabytes = sum(tensor.nbytes for tensor in state.values()) / 1e9
    common, rounds = {"gigabytes": gigabytes, "device": device}, rounds[1:] or rounds
    summary = {
        "memory": common | _compared(rounds),
        "memory, against unverified": common | _compared(rounds, "unverified"),
    }
    if asked.breakdown:
        summary["memory"]["parts"] = _median_parts(rounds)
    return summary


def _median_parts(rounds: list[dict[str, Folder]]) -> dict[str, dict[str, list[float]]]:
    """Return the medians of each part of a load, those that take longest first: seconds, and those of a core."""
    none = (0.0, 0.0)
    parts = {part for one in rounds for side in SIDES for part in one[side]["parts"]}
    found = {
        part: {
            side: [statistics.median(one[side]["parts"].get(part, none)[kind] for one in rounds) for kind in (0, 1)]
            for side in SIDES
        }
        for part in parts
    }
    return dict(sorted(found.items(), key=lambda one: one[1]["with"], reverse=True))


def _state(gigabytes: float, device: str) -> dict[str, Any]:
    """Return the parameters and both moments of a GPT of that size, and steps on the host, as AdamW has them."""
    import torch

    width = 2048 if gigabytes > 2 else 512
    shapes = {"qkv": (3 * width, width), "proj": (width, width), "up": (4 * width, width), "down": (width, 4 * width)}
    shapes |= {"norm1": (width,), "norm2": (width,), "bias": (4 * width,)}
    state, nbytes, layer = dict[str, Any](), 0, 0
    while nbytes < 1e9 * gigabytes:
        for name, shape in shapes.items():
            for kind in ("weight", "exp_avg", "exp_avg_sq"):
                tensor = torch.randn(shape, device=device)
                state[f"layers.{layer}.{name}.{kind}"] = tensor
                nbytes += tensor.nbytes
            state[f"layers.{layer}.{name}.step"] = torch.tensor(float(layer))
        layer += 1
    return state


def _rounds(
    asked: argparse.Namespace, folder: Path, tensors: dict[str, Any], end: float
) -> Iterator[dict[str, Folder]]:
    from lightning_ups.state.checkpoint import Saver

    savers = [Saver(asynchronous=is_async, threads=asked.threads) for is_async in (False, True)]
    root = Path(tempfile.mkdtemp(dir=folder))
    try:
        took = 0.0
        for number in range(1 + asked.rounds):
            began = time.monotonic()
            if number and began + took > end:
                break
            order = ("without", "with")[:: 1 if number % 2 == 0 else -1]
            turn = _save if asked.saves else _turn
            found = {side: turn(root, tensors, savers, asked.threads, side=side) for side in order}
            took = time.monotonic() - began
            yield found
    finally:
        shutil.rmtree(root)
        for saver in savers:
            saver.close()


def _save(root: Path, tensors: dict[str, Any], savers: list[Any], _threads: int | None, *, side: str) -> Folder:
    found = dict[str, Any]()
    with _without_checksums() if side == "without" else nullcontext():
        _save_and_wait(root, tensors, savers[0], found)
    shutil.rmtree(root / "sync")
    return found


def _save_and_wait(root: Path, tensors: dict[str, Any], saver: Any, found: Folder) -> None:
    cpu = time.process_time()
    saver.save({"state_dict": tensors}, files={"meta.pt": b"meta"}, path=root / "sync")
    found["sync_cpu_s"] = time.process_time() - cpu
    found["sync_s"] = saver.last.blocked_s


def _turn(root: Path, tensors: dict[str, Any], savers: list[Any], threads: int | None, *, side: str) -> Folder:
    sync, background = savers
    found = dict[str, Any]()
    with _without_checksums() if side == "without" else nullcontext():
        _save_and_wait(root, tensors, sync, found)
        _forget(root / "sync")
        found |= _load(root / "sync", tensors, threads)
        shutil.rmtree(root / "sync")
        background.save({"state_dict": tensors}, files={"meta.pt": b"meta"}, path=root / "background")
        found["blocked_s"] = background.last.blocked_s
        background.wait()
        found["background_s"] = background.last.total_s
        shutil.rmtree(root / "background")
    return found


def _load(
    folder: Path, tensors: dict[str, Any], threads: int | None, *, side: str = "with", breakdown: bool = False
) -> Folder:
    from lightning_ups.state.checkpoint.io import reading

    name, watched = next(iter(tensors.items()))
    expected = watched.clone()
    watched.zero_()
    _wait_for_device()
    sides = {"without": _without_checksums, "unverified": _without_verifying, "with": nullcontext}
    with sides[side](), _parts() if breakdown else nullcontext() as parts:
        start, cpu = time.perf_counter(), time.process_time()
        targets = {f"state_dict.{name}": value for name, value in tensors.items()}
        reading.read_into(targets, reading.FolderReader(folder, threads=threads))
        _wait_for_device()
        found: Folder = {"load_s": time.perf_counter() - start, "load_cpu_s": time.process_time() - cpu}
    if parts is not None:
        found["parts"] = parts
    if not watched.equal(expected):
        raise AssertionError(f"{name} was not loaded as it was saved")
    return found


@contextmanager
def _parts() -> Iterator[dict[str, list[float]]]:
    """Give the seconds of all threads in each part of a load, and those of a core; they are there at the end."""
    from lightning_ups.state.checkpoint import checksums, folder
    from lightning_ups.state.checkpoint.io import lanes, reading

    timed = {
        "plan": (reading, "read_into"),
        "metadata": (reading.FolderReader, "read_metadata"),
        "read checksums": (folder, "records"),
        "pin": (lanes, "_pinned"),
        "rest of lanes": (lanes._Crew, "_guarded"),  # Python, opening files, and waiting for the GIL
        "read head and tail": (checksums.RecordReader, "ends"),
        "parse": (reading, "_template"),
        "read": (checksums.RecordReader, "_read"),
        "start copies": (lanes._Buffer, "send"),
        "wait for copies": (lanes._Buffer, "wait"),
        "verify": (lanes, "verify"),
        "sum on device": (lanes, "device_sums"),
        "compare sums": (checksums.Chunks, "check"),
        "sum on host": (checksums, "_check_bytes"),
        "wait for helpers": (checksums.Verifier, "wait"),
    }
    spent, found, within = list[tuple[str, float, float]](), dict[str, list[float]](), threading.local()

    def with_time(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            outer, within.spent = getattr(within, "spent", (0.0, 0.0)), (0.0, 0.0)
            outer_part, within.part = getattr(within, "part", None), part
            start, cpu = time.perf_counter(), time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                took, worked = time.perf_counter() - start, time.thread_time() - cpu
                spent.append((part, took - within.spent[0], worked - within.spent[1]))
                within.spent, within.part = (outer[0] + took, outer[1] + worked), outer_part

        return call

    with ExitStack() as patches:
        for part, (owner, name) in timed.items():
            patches.enter_context(patch.object(owner, name, with_time(part, getattr(owner, name))))
        yield found
    sums = defaultdict[str, list[float]](lambda: [0.0, 0.0])
    for part, seconds, cpu_seconds in spent:
        sums[part][0] += seconds
        sums[part][1] += cpu_seconds
    found |= sums


@contextmanager
def _without_checksums() -> Iterator[None]:
    """Let checkpoints be written and read without checksums of their data."""
    from lightning_ups.state.checkpoint import folder
    from lightning_ups.state.checkpoint.checksums import Piece, SummedRecord
    from lightning_ups.state.checkpoint.io import lanes

    def write_body(self: SummedRecord, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            self.stream.write(piece.data)
            self.length += len(piece.data)

    with (
        patch.object(SummedRecord, "write_body", write_body),
        patch.object(lanes, "worth_summing_on_device", lambda row: False),  # noqa: ARG005
        patch.object(folder, "records", lambda path: None),  # noqa: ARG005
        patch.object(folder, "verify", lambda path: None),  # noqa: ARG005
    ):
        yield


@contextmanager
def _without_verifying() -> Iterator[None]:
    """Let the bytes of tensors be read without verifying them; all else is as with checksums."""
    from lightning_ups.state.checkpoint.checksums import RecordReader

    def read(self: RecordReader, room: memoryview, place: int, *, verify: bool = True) -> None:  # noqa: ARG001
        self._read(room, place)

    with (
        patch.object(RecordReader, "read", read),
        patch.object(RecordReader, "chunks_for_device", lambda self, row, place: None),  # noqa: ARG005
    ):
        yield


def _forget(path: Path) -> None:
    """Drop the files of a folder from the cache of the system, so that they are read from the disk; memory stays."""
    for file in path.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _wait_for_device() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _compared(rounds: list[dict[str, Folder]], base: str = "without") -> dict[str, Any]:
    """Return the medians of the side `with` and of another one, and of how they compare in each round."""
    found: dict[str, Any] = {"rounds": len(rounds)}
    for figure in (figure for figure in FIGURES if figure in rounds[0]["with"]):
        ratios = [one["with"][figure] / one[base][figure] for one in rounds]
        medians = {side: statistics.median(one[side][figure] for one in rounds) for side in (base, "with")}
        found[figure] = medians | {"ratio": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
    return found


if __name__ == "__main__":
    main()
