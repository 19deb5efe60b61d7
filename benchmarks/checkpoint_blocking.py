"""For how many seconds does a save block training, synchronous and in the background?

The 1.5 B GPT under FSDP2Strategy on every visible GPU, with AdamW's state in float32: 18 GB in all. Each way saves
three times; the first save in the background also pins its host memory. Between saves a run has time to write: what a
save waits for the one before is told apart, as `waited_s`. Then the run resumes from the second save, and the losses of
the steps in between are compared. The first checkpoint is deleted in between: two lie in --folder at most, 36 GB.

    python benchmarks/checkpoint_blocking.py --output benchmarks/results/DATE_checkpoint_blocking
"""

import argparse
import gc
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cases import add_to, earlier, keep, left_on_device, prepare, unmet_gpus
from processes import Interrupted, finished

STEPS, EVERY = 24, 8
BYTES = {"tiny": 10**8, "150M": 2 * 10**9, "1B": 19 * 10**9, "8B": 97 * 10**9}  # of a checkpoint, 12 for each weight


def main() -> None:
    """Start one process for each GPU and way, or be one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("checkpoint_blocking"))
    parser.add_argument("--size", choices=["tiny", "150M", "1B", "8B"], default="1B")
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--accelerator", choices=["gpu", "cpu"], default="gpu")
    parser.add_argument("--budget", type=float, default=540, help="seconds for everything")
    parser.add_argument("--folder", type=Path, help="where checkpoints go, such as /dev/shm; default: a temporary one")
    parser.add_argument("--timeout", type=float, default=240, help="seconds for each way")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.way:
        print("\nRESULT " + json.dumps(_measure(asked)), flush=True)
        _part()
        return
    if lacks := _unmet(asked):
        parser.error(lacks)
    prepare(parser, asked.output)
    before, results = earlier(asked.output / "result.json"), list[dict[str, Any]]()
    start = time.monotonic()
    try:
        for way in ("sync", "async"):
            left = asked.budget - (time.monotonic() - start)
            if left < (60 if asked.accelerator == "gpu" else 0):
                print(f"{way}: left out, {left:.0f} s of the budget are left", flush=True)
                continue
            result, interrupted = _in_processes(asked, way, timeout=min(asked.timeout, left))
            results.append(result)
            keep(asked.output / "result.json", [*before, *results])
            if interrupted is not None:
                raise interrupted
    finally:  # also when it is told to end
        print(json.dumps(results, indent=1), flush=True)


def _part() -> None:
    """End this rank's groups when all have come so far: one that leaves others waiting costs the whole timeout."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def _unmet(asked: argparse.Namespace) -> str | None:
    """Say what is asked for and cannot be."""
    if asked.accelerator == "gpu" and (lacks := unmet_gpus(1, what="this")):
        return f"{lacks}: --accelerator cpu --size tiny --seq 32 tries it out"
    folder = asked.folder or Path(tempfile.gettempdir())
    if not folder.is_dir():
        return f"--folder {folder} does not exist: name one that does, such as /dev/shm"
    needed, free = 2 * BYTES[asked.size], shutil.disk_usage(folder).free
    if free < needed:
        return (
            f"two checkpoints need {needed / 1e9:.0f} GB in {folder}, which has {free / 1e9:.0f} free:"
            " name another --folder, or a smaller --size"
        )
    return None


def _in_processes(asked: argparse.Namespace, way: str, *, timeout: float) -> tuple[dict[str, Any], Interrupted | None]:
    import torch

    number, interrupted = torch.cuda.device_count() if asked.accelerator == "gpu" else 1, None
    with tempfile.TemporaryDirectory(dir=asked.folder, ignore_cleanup_errors=True) as folder:
        command = [sys.executable, __file__, "--way", way, "--size", asked.size, "--seq", str(asked.seq)]
        command += ["--accelerator", asked.accelerator, "--folder", folder]
        try:
            output = finished(command, timeout=timeout, ranks=number)
        except Interrupted as error:
            interrupted, output = error, error.said + "\nended, since the benchmark was interrupted"
    add_to(asked.output / "log.txt", f"===== {way}\n{output}\n")
    return _result(output, way=way, ranks=number), interrupted


def _result(output: str, *, way: str, ranks: int) -> dict[str, Any]:
    """Return what rank zero found, and of each save how long the rank waited that it held up longest."""
    found: dict[int, dict[str, Any]] = {}
    for line in output.splitlines():
        if line.startswith("RESULT "):
            with suppress(json.JSONDecodeError):  # cut off
                one = json.loads(line.removeprefix("RESULT "))
                found[one["rank"]] = one
    if len(found) != ranks:
        return {"way": way, "error": output.strip()[-1500:] or "it ended without a word", "ranks_done": sorted(found)}
    saves = zip(*(one["saves"] for one in found.values()), strict=True)
    return found[0] | {"blocked_s_slowest_rank": [max(save["blocked_s"] for save in ranks) for ranks in saves]}


def _measure(asked: argparse.Namespace) -> dict[str, Any]:
    import torch
    from lightning.pytorch import Callback, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.utils.data import DataLoader

    from lightning_ups.models.gpt import GPTModule
    from lightning_ups.strategies import FSDP2Strategy

    warnings.simplefilter("ignore")
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))

    class Watch(Callback):
        def __init__(self) -> None:
            self.losses: dict[int, float] = {}
            self.times: list[float] = []

        def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, *_: Any, **__: Any) -> None:
            self.losses[trainer.global_step] = outputs["loss"].item()  # waits, so that a step's time is a step's time
            self.times.append(time.monotonic())
            if trainer.global_step == 2 * EVERY + EVERY // 2 and trainer.is_global_zero:
                shutil.rmtree(asked.folder / f"step={EVERY}.ckpt", ignore_errors=True)  # whole, or the next had failed

    def fit(ckpt_path: Path | None, *, save: bool) -> tuple[Watch, list[dict[str, Any]]]:
        options: dict[str, Any] = {"meta_device": True, "initialise_on": "device"}
        strategy, watch, saves = FSDP2Strategy(async_save=asked.way == "async", **options), Watch(), []
        stock = strategy.save_checkpoint

        def noted(*args: Any, **kwargs: Any) -> None:
            began = time.monotonic()
            strategy.checkpoints.saver.wait()  # steps here are fewer than a run has between saves
            started = time.monotonic()
            stock(*args, **kwargs)
            times = strategy.checkpoints.saver.last
            assert times is not None
            blocked = time.monotonic() - started
            saves.append({"blocked_s": blocked, "staging_s": times.staging_s, "waited_s": started - began})

        strategy.save_checkpoint = noted  # type: ignore[method-assign]
        savers = [ModelCheckpoint(asked.folder, filename="{step}", every_n_train_steps=EVERY, save_top_k=-1)]
        trainer = Trainer(
            accelerator=asked.accelerator,
            devices=world,
            strategy=strategy,
            precision="bf16-mixed",
            max_steps=STEPS,
            callbacks=[watch, *(savers if save else [])],
            enable_checkpointing=save,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=asked.folder,
        )
        torch.manual_seed(0)
        tokens = torch.randint(256, (256, asked.seq + 1))
        module = GPTModule(size=asked.size, warmup_steps=1, schedule="constant")
        gc.collect()  # what the first run held is not in the way of the second
        with left_on_device(module):
            rows: Any = list(tokens)
            data = DataLoader(rows, batch_size=1, shuffle=True)
            trainer.fit(module, data, ckpt_path=ckpt_path)
        last = strategy.checkpoints.saver.last
        if last is not None and saves:
            saves[-1]["total_s"] = last.total_s
        return watch, saves

    watch, saves = fit(None, save=True)
    resumed, _ = fit(asked.folder / f"step={2 * EVERY}.ckpt", save=False)
    later = [step for step in resumed.losses if step > 2 * EVERY]
    gaps = [b - a for a, b in zip(watch.times, watch.times[1:], strict=False)]
    folder = asked.folder / f"step={2 * EVERY}.ckpt"
    return {
        "way": asked.way,
        "rank": rank,
        "devices": world,
        "device": torch.cuda.get_device_name() if asked.accelerator == "gpu" else "cpu",
        "torch": version("torch"),
        "checkpoint_gigabytes": round(sum(file.stat().st_size for file in folder.iterdir()) / 1e9, 2),
        "saves": saves,
        "step_s_median": statistics.median(gaps),
        "step_s_while_writing_median": statistics.median(gaps[EVERY : EVERY + 4]),
        "resumed_steps": len(later),
        "largest_relative_difference_of_losses": max(
            abs(resumed.losses[step] - watch.losses[step]) / watch.losses[step] for step in later
        ),
    }


if __name__ == "__main__":
    main()
