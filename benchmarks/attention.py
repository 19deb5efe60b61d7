"""Attention on this GPU: is every backend right, how fast is it, and how far behind the best is `auto`.

    python benchmarks/attention.py --out DIR [--install] [--minutes 7.8] [--without-fa4]
    python benchmarks/attention.py --out DIR --held-out [--minutes 3]

Parts run in processes of their own, each with a share of the time that is left, so that one that fails costs only
itself: the ``correct`` ones, all at once, compare outputs and gradients with the reference in float64; ``128`` to
``32`` time the table's shapes and the held-out ones for that width of heads, those of usual training first;
``masked`` times windows and documents. Every measurement is a line of JSON in DIR/attention.jsonl as soon as it is
made, and a later call with the same DIR goes on from them, on the same device and versions; a shape at which a process
died is tried last. From them come the table that `auto` reads, DIR/<device>.json, those
held out, DIR/<device>_held_out.json, and auto's regret: its time over the best time, on shapes that are in the table
and on others. ``--install`` also puts the first into the package and the second among its tests: what was measured
takes the place of the same shapes there, and others stay if they were measured with the same versions and in the same
way. Shapes held out are fresh: none of them was known when the way of choosing was last changed; a change that looks at
them has to take others. The whole report is DIR/attention.txt, its short form is printed. Both are written anew after
each part; ``--minutes 0`` writes them from the measurements that DIR has.

``--held-out`` times the held-out shapes alone, and asks what `auto` takes by the table that the package has: what its
users get.

A GPU on which FlashAttention-4 cannot be loaded, or is right nowhere, ends it: the table would lack what it is made
for. ``--without-fa4`` makes it all the same.

Times are the device's, medians over rounds in which the backends take turns: a sleeping kernel goes first, so that the
host has queued everything before the first call begins. ``host`` has the milliseconds that the host takes for a call,
the least of some bursts, as all that disturbs it only adds; auto counts a call as no shorter than that. Small shapes
come first, since there the host matters. TFLOP/s count causal attention as half, and forward plus backward as 3.5
times the forward pass.

On a CPU all shapes are tiny, so that the script can be tried.
"""

import argparse
import datetime
import itertools
import json
import math
import os
import platform
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
from processes import finished, portable, told_to_end

from lightning_ups._compat.torch.tensors.attention import missing_package
from lightning_ups.kernels.attention import Documents, attention, reference_attention
from lightning_ups.kernels.attention import auto as selection
from lightning_ups.kernels.attention.estimates import Expected, Regions, Row, Table, parse_table
from lightning_ups.kernels.attention.support import BACKENDS, KernelName, Kind, kind_of, refusal

CHECKED: dict[str, tuple[KernelName, ...]] = {
    "correct-torch": ("math", "efficient", "flash", "cudnn", "fa3"),
    "correct-fa4": ("fa4",),
    "correct-flex": ("flex",),
}
SHARES = {**dict.fromkeys(CHECKED, 0.24), "128": 0.2, "64": 0.19, "256": 0.19, "masked": 0.09, "32": 0.09}
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
TOGETHER = (tuple(CHECKED), ("128",), ("64",), ("256",), ("masked",), ("32",))
HELD_OUT = {"128, held out": 0.34, "64, held out": 0.33, "256, held out": 0.33}  # with --held-out, instead
TIMED: tuple[KernelName, ...] = ("cudnn", "flash", "fa3", "fa4") if ON_GPU else ("math", "flash")
ROUNDS = 3
END_S = 18  # of a part's time, in which it starts, and ends what it has begun
ODD, EVEN, LONG = (1001, 512, 8192) if ON_GPU else (101, 64, 128)
TOLERANCE = 1.5e-2  # bfloat16 has 8 bits
SMALL = 2e11  # pairs x width: where a forward and a backward take less than about 3 ms, and hosts matter
LONG_MS = 3.0  # where they do not
REGRET = 0.03  # which the whole is to stay within
TRIES = 3  # of a part whose process dies
TESTS = Path(__file__).parents[1] / "tests" / "kernels" / "attention"


class Shape(NamedTuple):
    """One shape: ``held`` ones are not in the table, and fresh."""

    head_dim: int
    heads: int
    kv_heads: int
    seq: int
    batch: int
    causal: bool = True
    held: bool = False


def shapes(head_dim: int) -> list[Shape]:
    """Return what is timed for one width of heads: what is small, usual training, shapes held out, and the rest."""
    return sorted(_shapes(head_dim), key=lambda shape: not small(shape))


def small(shape: Shape) -> bool:
    """Return whether the host matters."""
    return shape.batch * shape.heads * shape.seq**2 * shape.head_dim <= SMALL


def _shapes(head_dim: int) -> Iterator[Shape]:
    if not ON_GPU:
        yield from (Shape(head_dim, 4, 2, 32, 2), Shape(head_dim, 4, 2, 48, 1, held=True))
        return
    if head_dim == 32:  # small models, such as the quickstart's
        for seq in (256, 512, 1024, 4096):
            yield Shape(32, 4, 2, seq, 131072 // seq)
            yield Shape(32, 8, 8, seq, 16384 // seq)
        return
    for seq in (1024, 2048, 4096, 8192):
        yield Shape(head_dim, 32, 8, seq, 32768 // seq)
    held = [
        (24, 8, 1664, 8), (40, 20, 2304, 5), (64, 8, 3328, 3), (12, 12, 11264, 2), (36, 36, 1920, 4),
        (16, 2, 1408, 4), (48, 12, 6656, 2), (24, 6, 9216, 3), (40, 5, 24576, 1),
    ]  # fmt: skip
    for heads, kv_heads, seq, batch in held[:4]:
        yield Shape(head_dim, heads, kv_heads, seq, batch, held=True)
    for seq in (16384, 32768):
        yield Shape(head_dim, 32, 8, seq, 32768 // seq)
    if head_dim == 64:  # those of the 150M GPT
        yield Shape(64, 12, 4, 1024, 32)
        yield Shape(64, 12, 4, 1024, 4)
    for seq in (1024, 2048, 4096, 8192, 16384, 32768):
        yield Shape(head_dim, 32, 32, seq, max(16384 // seq, 1))
    for seq in (1024, 2048, 4096):
        yield Shape(head_dim, 32, 8, seq, max(4096 // seq, 1))
    # Where backends are near each other, and other counts of heads.
    for heads, kv_heads, seq, batch in (
        (32, 8, 1536, 2), (32, 8, 1536, 16), (32, 32, 1536, 8), (32, 4, 1536, 16), (32, 8, 12288, 2), (32, 4, 12288, 2),
        (16, 16, 3072, 4), (32, 8, 4096, 2), (32, 8, 6144, 4), (64, 8, 8192, 1), (20, 4, 1280, 8), (36, 12, 1792, 6),
        (56, 8, 3584, 3), (20, 20, 14336, 1), (48, 48, 2560, 3), (24, 24, 1280, 3), (40, 8, 5120, 3), (28, 4, 10240, 2),
        (16, 2, 20480, 1),
    ):  # fmt: skip
        yield Shape(head_dim, heads, kv_heads, seq, batch)
    for heads, kv_heads, seq, batch in held[4:]:
        yield Shape(head_dim, heads, kv_heads, seq, batch, held=True)
    for seq in (1024, 2048, 4096, 8192, 16384):
        yield Shape(head_dim, 32, 8, seq, 16384 // seq, causal=False)
    yield Shape(head_dim, 40, 8, 3072, 3, causal=False)
    yield Shape(head_dim, 56, 14, 2816, 3, causal=False, held=True)


SHAPE = ("mask", *Row._fields[:6])  # what of a row says what was measured


def main() -> None:
    """Run one part, or all of them in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", "--output", type=Path, default=Path(os.environ.get("OUT", "benchmarks/results")), dest="out"
    )
    parser.add_argument("--install", action="store_true", help="put the table into the package")
    parser.add_argument("--minutes", type=float, default=7.8)
    parser.add_argument("--without-fa4", action="store_true", help="go on where FlashAttention-4 cannot be had")
    parser.add_argument("--held-out", action="store_true", help="time what is held out, for the package's table")
    parser.add_argument("--part", choices=SHARES | HELD_OUT, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=100.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    log = options.out / "attention.jsonl"
    if options.part:
        run_part(options.part, deadline=time.monotonic() + options.seconds, log=log)
        return
    if wrong := refused(options):
        raise SystemExit(wrong)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.minutes:
        if log.exists():
            print(f"going on from {len(measured(log))} measurements of an earlier call", flush=True)
        for _ in run_all(seconds=options.minutes * 60, folder=options.out, held_out=options.held_out):
            keep(options.out, install=options.install, show=False, held_out=options.held_out)
            checked = ON_GPU and not (options.without_fa4 or options.held_out)
            if checked and (failed := fa4_is_wrong(measured(log))):
                raise SystemExit(failed)
    keep(options.out, install=options.install, show=True, held_out=options.held_out)


def refused(options: argparse.Namespace) -> str | None:
    """Return what is known to be wrong before anything has run."""
    log = options.out / "attention.jsonl"
    if options.minutes < 0 or (options.minutes == 0 and not log.exists()):
        return f"--minutes {options.minutes:g} measures nothing, and there are no measurements in --out to report on."
    if options.install and (options.without_fa4 or (options.minutes and not ON_GPU)):
        return "--install is for a table of a GPU with FlashAttention-4. Leave it or --without-fa4 out, and see --help."
    if options.held_out and options.install:
        return "--install is for a whole table, and --held-out times what is in none. Leave one of them out."
    if options.held_out:
        on = next((line["device"] for line in read(log) if line["part"] == "device"), device()["device"])
        if not in_package(on).exists():
            return f"--held-out asks the package's table, and it has none of {on}. Leave it out."
    if not options.minutes:
        return None
    if ON_GPU and not options.without_fa4 and (missing := missing_package("fa4")):
        return (
            f"{portable(missing)}. The table would lack its times, for which it is made."
            " Install it: pip install 'lightning-ups[flash]'; or give --without-fa4."
        )
    if log.exists():
        for line in read(log):
            if line["part"] == "device" and (other := different(line, device())):
                return (
                    f"{log.name} in --out was measured with {other}. Times of two machines make no table."
                    " Give another --out."
                )
    return None


def different(line: dict[str, Any], here: dict[str, Any]) -> str:
    """Return what of a measurement's machine is not as it is here, in words, or nothing."""
    theirs, ours = ({"device": machine["device"], **machine["versions"]} for machine in (line, here))
    names = sorted(name for name in {*theirs, *ours} - {"python"} if theirs.get(name) != ours.get(name))
    return ", ".join(f"{name} {theirs.get(name, 'absent')} (here {ours.get(name, 'absent')})" for name in names)


def fa4_is_wrong(lines: Iterable[dict[str, Any]]) -> str | None:
    """Return that FlashAttention-4 was tried and is right nowhere."""
    tried = [line for line in lines if line["part"] == "correct" and line["backend"] == "fa4"]
    if any(line.get("ok") for line in tried):
        return None
    why = "; ".join(sorted({str(line.get("error") or line.get("refused") or line.get("errors")) for line in tried}))
    return (
        f"FlashAttention-4 is right in none of {len(tried)} cases: {why[:600] or 'log.txt has the reason'}."
        " The table would lack its times. Mend it, or give --without-fa4; what is measured is kept."
    )


def read(log: Path) -> list[dict[str, Any]]:
    """Return all whole lines of a log, whose last may have been cut off."""
    found = []
    for text in log.read_text().splitlines() if log.exists() else ():
        try:
            found.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return found


def measured(log: Path) -> list[dict[str, Any]]:
    """Return the measurements of a log, the latest of each."""
    lines = [line for line in read(log) if line["part"] not in ("device", "begun")]
    return list({identity(line): line for line in lines}.values())


def identity(line: dict[str, Any]) -> str:
    """Return what of a line says what was measured."""
    names = ("part", "backend", "case", "mask", *Shape._fields)
    return json.dumps([line.get(name) for name in names])


def in_package(name: str) -> Path:
    """Return where the package has the table of a device, if it has one."""
    return Path(selection.__file__).parent / "measured" / f"{name.replace(' ', '_')}.json"


def keep(folder: Path, *, install: bool, show: bool, held_out: bool = False) -> None:
    """Write the table and the report of what was measured by now; with ``held_out`` there is no table to write."""
    log = folder / "attention.jsonl"
    machine = [line for line in read(log) if line["part"] == "device"][-1:]
    lines = [*machine, *measured(log)]
    if not machine:
        print("nothing was measured: log.txt has the reason", flush=True)
        return
    table = make_table(lines)
    held = not_in_table(lines, table)
    name = table["device"].replace(" ", "_")
    (folder / f"{name}_held_out.json").write_text(dump(held))
    if not held_out:
        (folder / f"{name}.json").write_text(dump(table))
    if install:
        put(in_package(name), table)
        put(TESTS / f"{name}_held_out.json", held)
    judged = json.loads(in_package(name).read_text()) if held_out else table
    with (folder / "attention.txt").open("w") as file:
        report(lines, table, file, show=show, judged=judged, parts=HELD_OUT if held_out else SHARES)


def put(path: Path, content: dict[str, Any]) -> None:
    """Write a table where it is read from; rows of the one that is there stay, as far as they go with it."""
    if path.parent.is_dir():
        before = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(dump(joined(before, content)))


def joined(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return ``after`` with those shapes of ``before`` that it lacks, if both were measured with the same versions."""

    def versions(table: dict[str, Any]) -> dict[str, str]:
        return {name: number for name, number in table.get("versions", {}).items() if name != "python"}

    if versions(before) != versions(after):
        return after
    told = dict(after)
    for name in ("masked", "rows"):
        rows = {json.dumps([row.get(part) for part in SHAPE]): row for row in after.get(name, ())}
        stay = (row for row in before.get(name, ()) if stays(row, before, after))
        rows = {json.dumps([row.get(part) for part in SHAPE]): row for row in stay} | rows
        if name in after:
            told[name] = list(rows.values())
    return told


def stays(row: dict[str, Any], before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Return whether a row's times are the device's also where those of its table could be the host's."""
    return ("host" in before) == ("host" in after) or min(row["training"].values()) > LONG_MS


def run_all(*, seconds: float, folder: Path, held_out: bool = False) -> Iterator[None]:
    """Run each part in a process of its own, which writes its measurements itself, and stop at every end of some."""
    log, end = folder / "attention.jsonl", time.monotonic() + seconds
    shares, turns = (HELD_OUT, [(part,) for part in HELD_OUT]) if held_out else (SHARES, TOGETHER)
    for number, together in enumerate(turns):
        # What a part leaves of its share is for those after it.
        share = shares[together[0]] / sum(shares[later[0]] for later in turns[number:])
        until = time.monotonic() + share * (end - time.monotonic())
        for _ in range(TRIES):
            todo, before = [part for part in together if missing(part, log)], len(read(log))
            left = until - time.monotonic()
            if not todo or left < END_S + (10 if ON_GPU else -END_S):
                break
            begun = time.monotonic()
            for part, text in at_once(todo, seconds=left, log=log).items():
                print(f"part {part}: {time.monotonic() - begun:.0f} s {text.strip()[-600:]}", flush=True)
                with (folder / "log.txt").open("a") as file:
                    file.write(f"===== {part}\n{text}\n")
            if len(read(log)) <= before + len(todo):  # only their devices: they do not even start
                break
        yield


def at_once(parts: Sequence[str], *, seconds: float, log: Path) -> dict[str, str]:
    """Run parts beside each other, and return what each says beside measurements."""
    stop = threading.Event()
    with told_to_end(), ThreadPoolExecutor() as beside:
        try:
            run = partial(part_in_process, seconds=seconds, log=log, stop=stop)
            return dict(zip(parts, beside.map(run, parts), strict=True))
        finally:
            stop.set()  # an interruption reaches this thread alone: the others wait for their processes


def part_in_process(part: str, *, seconds: float, log: Path, stop: threading.Event) -> str:
    """Run one part, which ends by itself before ``seconds`` are over, and return what it says beside measurements."""
    told = {"--part": part, "--seconds": str(max(seconds - END_S, 1)), "--out": str(log.parent)}
    command = [sys.executable, __file__, *itertools.chain(*told.items())]
    return finished(command, timeout=seconds, stop=stop)


def planned(part: str) -> Iterator[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]:
    """Yield what a part consists of, as the head of a line and what measures the rest of it."""
    if part in CHECKED:
        return correct(CHECKED[part])
    if part == "masked":
        return masked()
    width, _, held = part.partition(", ")
    return timed([shape for shape in shapes(int(width)) if shape.held or not held])


def missing(part: str, log: Path) -> list[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]:
    """Return what of a part is not measured yet; what was begun without an end, by then, comes last."""
    done = {identity(line) for line in measured(log)}
    begun = Counter(identity(line["what"]) for line in read(log) if line["part"] == "begun")
    left = [(head, measure) for head, measure in planned(part) if identity(head) not in done]
    return sorted(left, key=lambda one: begun[identity(one[0])])


def run_part(part: str, *, deadline: float, log: Path) -> None:
    """Write the measurements of one part as lines of JSON, each when it is made."""

    def write(line: dict[str, Any]) -> None:
        with log.open("a") as file:  # as one piece: other parts write there too
            file.write(portable(json.dumps(line)) + "\n")

    write({"part": "device", **device(), "date": today()})
    for head, measure in missing(part, log):
        if time.monotonic() >= deadline:
            break
        write({"part": "begun", "what": head})
        write({**head, **measure()})


def today() -> str:
    """Return the day."""
    return datetime.datetime.now(tz=datetime.UTC).date().isoformat()


def device() -> dict[str, Any]:
    """Return what the measurements depend on beside the shape."""
    versions = {"cuda": torch.version.cuda, "cudnn": str(torch.backends.cudnn.version())}
    for package in ("torch", "flash-attn-4", "nvidia-cutlass-dsl", "triton"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    name, capability = (torch.cuda.get_device_name(), torch.cuda.get_device_capability()) if ON_GPU else ("cpu", (0, 0))
    return {
        "device": name,
        "capability": list(capability),
        "versions": versions | {"python": platform.python_version()},
    }


# --- correctness

CASES: dict[str, dict[str, Any]] = {
    "causal, odd length": {"seq": ODD},
    "window": {"seq": ODD, "window": ODD // 10},
    "documents": {"seq": ODD, "documents": True},
    "documents, window": {"seq": ODD, "documents": True, "window": ODD // 10},
    "full": {"seq": ODD, "causal": False},
    "softcap 30": {"seq": EVEN, "softcap": 30.0},
    "8 query heads to 1": {"seq": EVEN, "kv_heads": 1},
    "multi-head": {"seq": EVEN, "kv_heads": 8},
}


def correct(backends: Sequence[KernelName]) -> Iterator[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]:
    """Compare backends with the reference in float64."""
    for backend, (name, case) in itertools.product(backends, CASES.items()):
        for head_dim in (128, 64, 256):
            if head_dim == 128 or name == "causal, odd length":
                head = {"part": "correct", "backend": backend, "case": name, "head_dim": head_dim}
                yield head, partial(compare, backend, head_dim, **case)


def compare(
    backend: KernelName,
    head_dim: int,
    *,
    seq: int,
    kv_heads: int = 2,
    causal: bool = True,
    window: int | None = None,
    documents: bool = False,
    softcap: float | None = None,
) -> dict[str, Any]:
    """Return the largest errors of output and gradients, relative to the largest true value."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    q, k, v = (
        torch.randn(2, seq, heads, head_dim, device=DEVICE, generator=generator).bfloat16().requires_grad_()
        for heads in (8, kv_heads, kv_heads)
    )
    torch.compiler.reset()  # FlexAttention is compiled for each case, and torch allows eight
    packed = None
    if documents:
        ids = torch.zeros(2, seq, dtype=torch.int64)
        ids[0, seq * 3 // 10 :] = 1
        ids[0, seq * 3 // 10 + 1 :] = 2
        ids[1, seq * 9 // 10 :] = 1
        packed = Documents.from_ids(ids).to(DEVICE)
    options: dict[str, Any] = {"causal": causal, "window": window, "documents": packed, "softcap": softcap}
    kind = kind_of(q, k, v, causal=causal, window=window is not None, documents=documents, softcap=softcap is not None)
    if refused := refusal(backend, kind):
        return {"refused": refused[0]}
    weight = torch.randn(q.shape, device=DEVICE, generator=generator)
    doubles = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
    wanted = with_gradients(lambda *tensors: reference_attention(*tensors, **options), doubles, weight.double())
    try:
        found = with_gradients(lambda *t: attention(*t, **options, backend=backend), (q, k, v), weight.bfloat16())
    except Exception as error:  # noqa: BLE001  (a backend that fails is a result)
        return {"error": f"{type(error).__name__}: {error}"[:400]}
    errors = [((a.double() - b).abs().max() / b.abs().max()).item() for a, b in zip(found, wanted, strict=True)]
    return {"errors": dict(zip(("out", "dq", "dk", "dv"), errors, strict=True)), "ok": max(errors) < TOLERANCE}


def with_gradients(function: Callable[..., Any], tensors: Sequence[Any], weight: torch.Tensor) -> list[torch.Tensor]:
    """Return the output and the gradients of ``tensors``."""
    out = function(*tensors)
    return [out.detach(), *torch.autograd.grad(out, tensors, weight)]


# --- speed


def timed(these: Iterable[Shape]) -> Iterator[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]:
    """Time each shape by each backend, forward alone and with backward."""
    for shape in these:
        yield {"part": "speed", **shape._asdict()}, partial(measure, shape, TIMED)


def masked() -> Iterator[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]:
    """Time windows and documents, FlexAttention among them."""
    among: tuple[KernelName, ...] = ("flash", "fa4", "fa3", "flex") if ON_GPU else ("math", "flash")
    window, length = LONG // 8, LONG * 1111 // 8192
    masks = {f"window {window}": {"window": window}, f"documents of {length}": {"length": length}, "causal": {}}
    for (name, mask), head_dim in itertools.product(masks.items(), (128, 64)):
        shape = Shape(head_dim, 32, 8, LONG, 2)
        yield {"part": "masked", "mask": name, **shape._asdict()}, partial(measure_masked, shape, among, **mask)


def measure_masked(shape: Shape, among: Sequence[KernelName], *, length: int = 0, **options: Any) -> dict[str, Any]:
    """Return the milliseconds of each backend, with documents of ``length`` where there is one."""
    if length:
        ids = (torch.arange(shape.batch * shape.seq) // length).view(shape.batch, shape.seq)
        options["documents"] = Documents.from_ids(ids).to(DEVICE)
    return measure(shape, among, **options)


def measure(shape: Shape, among: Sequence[KernelName], **options: Any) -> dict[str, Any]:
    """Return the milliseconds of each backend."""
    torch.cuda.empty_cache()
    q, k, v = (
        torch.randn(shape.batch, shape.seq, heads, shape.head_dim, device=DEVICE, dtype=torch.bfloat16)
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    )
    tensors = [tensor.requires_grad_() for tensor in (q, k, v)]
    grad = torch.randn_like(q)
    kind = kind_of(q, k, v, causal=shape.causal, window="window" in options, documents="documents" in options)

    def forward(backend: KernelName) -> torch.Tensor:
        return attention(q, k, v, causal=shape.causal, backend=backend, **options)

    def train(backend: KernelName) -> None:
        torch.autograd.grad(forward(backend), tensors, grad)

    def evaluate(backend: KernelName) -> None:
        with torch.no_grad():
            forward(backend)

    able: list[KernelName] = []
    trouble: dict[str, str] = {}
    first: dict[str, float] = {}
    for backend in among:
        if refused := refusal(backend, kind):
            trouble[backend] = f"refused: {refused[0]}"
            continue
        begun = time.monotonic()
        try:
            train(backend)
            evaluate(backend)
            wait()
            able.append(backend)
            first[backend] = round(time.monotonic() - begun, 2)
        except Exception as error:  # noqa: BLE001  (a backend that fails is a result)
            trouble[backend] = f"{type(error).__name__}: {error}"[:300]
    training: dict[str, Callable[[], None]] = {backend: partial(train, backend) for backend in able}
    forwards: dict[str, Callable[[], None]] = {backend: partial(evaluate, backend) for backend in able}
    host: dict[str, dict[str, float]] = {}
    if small(shape):
        host["training"] = {backend: round(queueing(call), 5) for backend, call in training.items()}
        host["forward"] = {backend: round(queueing(call), 5) for backend, call in forwards.items()}
    times = {
        "training": rounds(training, host.get("training", {})),
        "forward": rounds(forwards, host.get("forward", {})),
    }
    return {**times, "host": host, "first_call_s": first, "trouble": trouble}


def wait() -> None:
    """Wait until the device has done all its work."""
    if ON_GPU:
        torch.cuda.synchronize()


def rounds(calls: dict[str, Callable[[], None]], host: dict[str, float]) -> dict[str, float]:
    """Return the median milliseconds of each call; they take turns, so that clock and heat are alike."""
    lasts: dict[str, list[float]] = {name: [] for name in calls}
    queued = {name: partial(burst, call, host=host.get(name, 1.0)) for name, call in calls.items()}
    repeats = {name: min(max(math.ceil(12 / max(last(2), 1e-3)), 1), 10) for name, last in queued.items()}
    for _ in range(ROUNDS):
        for name, last in queued.items():
            lasts[name].append(last(repeats[name]))
    return {name: round(statistics.median(values), 5) for name, values in lasts.items()}


def burst(call: Callable[[], None], repeats: int, host: float) -> float:
    """Return the device's milliseconds for one of ``repeats`` calls, all queued behind a sleep."""
    if not ON_GPU:
        begun = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - begun) / repeats * 1e3
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    # About two milliseconds, or thrice the least that the host was seen to take, for each call that it queues.
    torch.cuda._sleep(int(2e6 * repeats * max(2.0, 3 * host)))
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / repeats


def queueing(call: Callable[[], None], repeats: int = 8) -> float:
    """Return the least milliseconds that the host took to queue a call: what disturbs it only adds."""
    lasts = []
    for _ in range(5):
        wait()
        begun = time.perf_counter()
        for _ in range(repeats):
            call()
        lasts.append((time.perf_counter() - begun) / repeats * 1e3)
    wait()
    return min(lasts)


# --- table and report


def make_table(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what `auto` reads."""
    machine = next(line for line in lines if line["part"] == "device")
    rows = [row(line) for line in lines if line["part"] == "speed" and not line["held"] and line.get("training")]
    table = {name: machine[name] for name in ("device", "capability", "versions")}
    table |= {"date": machine.get("date") or today()}
    if host := host_of(lines):
        table["host"] = host
    return {**table, "rows": rows}


def host_of(lines: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return what the host takes for a call of each backend: the median over shapes."""
    found: dict[str, dict[str, list[float]]] = {}
    for line in lines:
        if line["part"] == "speed":
            for part, times in line.get("host", {}).items():
                for backend, time in times.items() if isinstance(times, dict) else ():
                    found.setdefault(part, {}).setdefault(backend, []).append(time)
    return {
        part: {backend: round(statistics.median(times), 5) for backend, times in every.items()}
        for part, every in found.items()
    }


def row(line: dict[str, Any]) -> dict[str, Any]:
    """Return a measured line as a table has it."""
    return {name: line[name] for name in Row._fields}


def not_in_table(lines: Sequence[dict[str, Any]], table: dict[str, Any]) -> dict[str, Any]:
    """Return what `auto` is tested with."""
    timed = [line for line in lines if line.get("training")]
    masks = [{**row(line), "mask": line["mask"]} for line in timed if line["part"] == "masked"]
    rows = [row(line) for line in timed if line["part"] == "speed" and line["held"]]
    head = {name: table[name] for name in ("device", "versions", "date", "host") if name in table}
    return {**head, "masked": masks, "rows": rows}


def dump(table: dict[str, Any]) -> str:
    """Return the table as JSON, a row a line."""
    lists = {name: value for name, value in table.items() if name in ("rows", "masked")}
    head = {name: value for name, value in table.items() if name not in lists}
    text = json.dumps(head, indent=2)[:-2]
    for name, rows in lists.items():
        text += f',\n  "{name}": [\n' + ",\n".join("    " + json.dumps(one) for one in rows) + "\n  ]"
    return text + "\n}\n"


class Regret:
    """By which part what `auto` takes by a table is slower than the best that was measured, with ``host`` there."""

    def __init__(self, table: Table, host: Mapping[str, Mapping[str, float]]) -> None:
        self._expected: dict[str, Expected] = {
            part: selection.expected_of(table, trains=part == "training") for part in ("training", "forward")
        }
        self._host = host
        self._regions: dict[tuple[Any, ...], Regions] = {}

    def __call__(self, line: dict[str, Any], part: str) -> tuple[str, float]:
        """Return what is taken for a measured line, and its regret, the host counted."""
        host = self._host.get(part, {})
        times = {name: max(time, host.get(name, 0.0)) for name, time in line[part].items()}
        heads, width = (line["heads"], line["kv_heads"]), (line["head_dim"], line["head_dim"])
        kind = Kind("cuda", torch.bfloat16, *heads, *width, line["causal"], trains=part == "training")
        there = selection.extent(kind, batch=line["batch"], seq=line["seq"], **seen(line))
        if not self._expected[part].host.keys() & times.keys():
            return "", math.nan
        key = (kind, *times)
        if key not in self._regions:
            self._regions[key] = selection.regions_of(self._expected[part], kind, among=list(times))
        chosen = self._regions[key].at(length=there.length, pairs=there.pairs)
        return chosen, times[chosen] / min(times.values()) - 1


def seen(line: dict[str, Any]) -> dict[str, int]:
    """Return what a mask leaves to be seen, as `choose` takes it."""
    name, _, number = line.get("mask", "").rpartition(" ")
    if name == "window":
        return {"window": int(number)}
    return {"documents": -(-line["batch"] * line["seq"] // int(number))} if name else {}


def teraflops(line: dict[str, Any], milliseconds: float, part: str) -> float:
    """Return the speed that a time means; windows and documents are not taken into account."""
    pairs = line["seq"] ** 2 / (2 if line["causal"] else 1)
    products = 4 * line["batch"] * line["heads"] * line["head_dim"] * pairs
    return products * (3.5 if part == "training" else 1) / milliseconds / 1e9


def report(
    lines: Sequence[dict[str, Any]],
    content: dict[str, Any],
    file: TextIO,
    *,
    show: bool,
    judged: dict[str, Any],
    parts: Iterable[str],
) -> None:
    """Write correctness, speed and the regret of the table ``judged``; ``show`` it, less rows where all is well."""

    def write(text: str, *, short: bool = True) -> None:
        file.write(text + "\n")
        if short and show:
            print(text)

    write(json.dumps({name: content[name] for name in ("device", "versions", "date")}))
    checked = [line for line in lines if line["part"].startswith("correct")]
    wrong = [line for line in checked if not (line.get("ok") or "refused" in line)]
    right = [line for line in checked if line.get("ok")]
    write(f"\ncorrect: {len(right)} right, {len(wrong)} wrong or failed")
    for backend in BACKENDS:
        errors = [max(line["errors"].values()) for line in right if line["backend"] == backend]
        if errors:
            write(f"  {backend:10s} {len(errors):3d} cases, largest error {max(errors):.2e}")
    for line in wrong:
        write(f"  NOT {json.dumps(line)}")
    for part, times in content.get("host", {}).items():
        told = "  ".join(f"{name} {time * 1e3:.0f}" for name, time in times.items())
        write(f"host, {part}: microseconds to queue a call: {told}")
    regret = Regret(parse_table(json.loads(json.dumps(judged))), content.get("host", {}))
    for part in ("training", "forward"):
        write(f"\n{part}: TFLOP/s by backend; auto's choice and regret (* is held out)")
        worst: dict[bool, float] = {False: 0.0, True: 0.0}
        for line in lines:
            if line["part"] == "speed" and line.get(part):
                chosen, behind = regret(line, part)
                worst[line["held"]] = max(worst[line["held"]], behind)
                told = part == "training" or behind > 0.01
                write(row_text(line, part, f"{chosen:6s}{behind:5.1%}"), short=told)
        verdict = "within" if max(worst.values()) <= REGRET else "NOT within"
        write(
            f"largest regret, {part}: {worst[False]:.1%} in the table, {worst[True]:.1%} held out,"
            f" {verdict} {REGRET:.0%} of the best"
        )
    write("\nmasked: milliseconds, forward and backward; auto's choice and regret")
    for line in lines:
        if line["part"] == "masked" and line.get("training"):
            chosen, behind = regret(line, "training")
            times = "  ".join(f"{name} {time:.2f}" for name, time in line["training"].items())
            write(f"  {line['mask']:18s} D={line['head_dim']:3d} {times}  auto {chosen} {behind:.1%}")
    for line in lines:
        failed = {name: why for name, why in line.get("trouble", {}).items() if not why.startswith("refused")}
        if failed:
            shape = {name: line[name] for name in ("head_dim", "kv_heads", "seq", "batch") if name in line}
            write(f"  failed: {line['part']} {shape} {failed}")
    done = {identity(line) for line in lines}
    for part in parts if content["device"] == device()["device"] else ():  # another machine plans other shapes
        plan = [identity(head) for head, _ in planned(part)]
        if left := [one for one in plan if one not in done]:
            write(f"part {part}: {len(left)} of {len(plan)} not measured; the same command goes on from here")


def row_text(line: dict[str, Any], part: str, choice: str) -> str:
    """Return a line of the speed table."""
    speeds = "".join(f" {name} {teraflops(line, line[part][name], part):4.0f}" for name in line[part])
    heads = f"{line['heads']}/{line['kv_heads']}"
    shape = f"D={line['head_dim']:3d} {heads:5s} S={line['seq']:5d} B={line['batch']:2d}"
    return f"{'*' if line['held'] else ' '} {shape} {'causal' if line['causal'] else 'full  '}{speeds}  {choice}"


if __name__ == "__main__":
    main()
