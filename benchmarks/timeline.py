"""When kernels and collectives of a training step run, with and without overlap: the raw data of a picture.

    python benchmarks/timeline.py --output benchmarks/results/DATE_timeline  # two GPUs
    python benchmarks/timeline.py --tiny --output /tmp/timeline              # two CPU ranks, without kernels

A GPT with six blocks of the 1.5 B shape trains in pure bfloat16, two sequences of 4096 tokens on each rank. The sides
compile side by side, each in processes of its own, and then take turns: in its turn, a side has ten steps timed without
a profiler, and three under torch's profiler on rank 0.
`NAME.json.gz` has the kernels of these three: name, stream, start and length in microseconds.
"""

import argparse
import gzip
import json
import os
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from cases import add_to, earlier, keep, prepare, unmet_gpus
from processes import finished, result_of

SIDES: Mapping[str, tuple[str, Mapping[str, Any]]] = {  # strategy, options
    "overlap": ("simple_fsdp", {}),
    "no_overlap": ("simple_fsdp", {"overlap": "none"}),
    "fsdp2": ("fsdp2", {}),
}
BLOCKS, VOCABULARY, WARMUP, TIMED, PROFILED = 6, 32000, 6, 10, 3


def kernels(trace: Iterable[Mapping[str, Any]]) -> list[tuple[str, int, float, float]]:
    """Return name, stream, start and length of the kernels and copies of a trace, by their start."""
    found = [
        (event["name"], event["args"]["stream"], event["ts"], event["dur"])
        for event in trace
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    begin = min((start for *_, start, _ in found), default=0.0)
    moved = [(name, stream, round(start - begin, 3), round(length, 3)) for name, stream, start, length in found]
    return sorted(moved, key=lambda kernel: kernel[2])


def await_turn(side: str, sides: Sequence[str], rank: int, folder: Path, *, seconds: float = 90) -> None:
    """Wait until all ``sides`` are compiled, and those before ``side`` have been timed; no longer than ``seconds``."""
    (folder / f"{side}.{rank}.ready").touch()
    wanted = [f"{each}.{number}.ready" for each in sides for number in range(2)]
    wanted += [f"{each}.{number}.done" for each in sides[: sides.index(side)] for number in range(2)]
    end = time.monotonic() + seconds
    while time.monotonic() < end and not all((folder / name).exists() for name in wanted):
        time.sleep(0.05)


def work(side: str, sides: Sequence[str], output: Path, *, tiny: bool) -> None:
    """Train one side on this rank; rank 0 writes what it found."""
    import torch
    from lightning.pytorch import Callback, Trainer, seed_everything
    from torch.profiler import ProfilerActivity, profile
    from torch.utils.data import DataLoader

    from lightning_ups.callbacks import Compile
    from lightning_ups.models.gpt import GPTModule
    from lightning_ups.precision import BF16Precision
    from lightning_ups.strategies import FSDP2Strategy, SimpleFSDPStrategy

    cuda = torch.cuda.is_available()
    strategy, options = SIDES[side]
    kinds: dict[str, Any] = {"fsdp2": FSDP2Strategy, "simple_fsdp": SimpleFSDPStrategy}
    times: list[float] = []
    profiler = profile(activities=[ProfilerActivity.CUDA] if cuda else [ProfilerActivity.CPU])

    class Watch(Callback):
        """Times steps, then profiles some. Each timed step waits for the device once, at its end."""

        def on_train_batch_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
            if trainer.global_step == WARMUP:
                await_turn(side, sides, trainer.global_rank, output)
            if trainer.global_step == WARMUP + TIMED:
                profiler.start()
            self.began = time.perf_counter()

        def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
            if trainer.global_step > WARMUP + TIMED:  # the profiled steps are not waited for: the host runs ahead
                return
            if cuda:
                torch.cuda.synchronize()
            if trainer.global_step > WARMUP:
                times.append(round(1e3 * (time.perf_counter() - self.began), 3))

    seed_everything(1, verbose=False)
    seq = 64 if tiny else 4096
    module = GPTModule(size="tiny" if tiny else "1B", vocab_size=VOCABULARY, max_seq_len=seq, schedule="constant")
    module.config = replace(module.config, num_layers=BLOCKS)
    rows = torch.randint(VOCABULARY, (128, seq + 1), generator=torch.Generator().manual_seed(0))
    trainer = Trainer(
        accelerator="cuda" if cuda else "cpu",
        devices=2,
        strategy=kinds[strategy](**options),
        plugins=[BF16Precision(weights="masters")],
        callbacks=[Watch(), *([Compile()] if strategy == "fsdp2" and cuda else [])],
        max_steps=WARMUP + TIMED + PROFILED,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(rows, batch_size=2, pin_memory=cuda))  # type: ignore[arg-type]
    if cuda:
        torch.cuda.synchronize()
    profiler.stop()
    (output / f"{side}.{trainer.global_rank}.done").touch()
    if trainer.is_global_zero:
        path = output / f"{side}.trace.json"
        profiler.export_chrome_trace(str(path))
        found = kernels(json.loads(path.read_text())["traceEvents"])
        path.unlink()
        with gzip.open(output / f"{side}.json.gz", "wt") as file:
            json.dump(found, file)
        device = torch.cuda.get_device_name() if cuda else "cpu"
        figures = {"step_ms": times, "median_ms": statistics.median(times), "kernels": len(found), "device": device}
        print("\nRESULT " + json.dumps(figures), flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def main() -> None:
    """Run the sides one after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", nargs="*", choices=[*SIDES], default=[*SIDES])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=300, help="seconds")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--side", choices=[*SIDES], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        work(options.side, options.sides, options.output, tiny=options.tiny)
        return
    if not options.tiny and (lacks := unmet_gpus(2, what="timeline")):
        parser.error(lacks)
    prepare(parser, options.output)

    def run(side: str) -> tuple[str, str]:
        command = [sys.executable, __file__, "--side", side, "--sides", *options.sides, "--output", str(options.output)]
        threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "4")}
        told = command + ["--tiny"] * options.tiny
        return side, finished(told, timeout=options.budget, ranks=2, environment=threads)

    marks = [f"{side}.{rank}.{kind}" for side in SIDES for rank in range(2) for kind in ("ready", "done")]
    for mark in marks:
        (options.output / mark).unlink(missing_ok=True)
    results = earlier(options.output / "result.json")
    with ThreadPoolExecutor(len(options.sides)) as pool:
        for side, text in pool.map(run, options.sides):
            add_to(options.output / "log.txt", f"===== {side}\n{text}\n")
            results.append({"side": side, **result_of(text)})
            keep(options.output / "result.json", results)
            print(json.dumps(results[-1]), flush=True)
    for mark in marks:
        (options.output / mark).unlink(missing_ok=True)


if __name__ == "__main__":
    main()
