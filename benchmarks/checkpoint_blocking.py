"""For how many seconds does a save block training, in the background and at once, and how fast are bytes moved?

The 1.5 B GPT under FSDP2Strategy on every visible GPU, with AdamW's state in float32: 18 GB in all. Each way saves
three times; the first save in the background also pins its host memory. Between saves a run has time to write: what a
save waits for the one before is told apart, as `waited_s`. Then the run resumes from the last save but one, and the
losses of the steps in between are compared. The first checkpoint is deleted in between: two lie in --folder at most,
36 GB. Beside it, the same number of threads writes as many bytes to the same folder and does nothing else: `raw_write`.

    python benchmarks/checkpoint_blocking.py --folder /dev/shm --output benchmarks/results/DATE_checkpoint_blocking
    python benchmarks/checkpoint_blocking.py --size 8B --ways async --no-resume --steps 6 --folder /dev/shm

Each way has its share of --budget; the second line stages what 4 GPUs hold of 8 B weights, 24 GB each. With
``--layers 14`` two GPUs hold and stage as much each, of a model that is half as deep.
"""

import argparse
import gc
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
import warnings
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cases import add_to, earlier, keep, left_on_device, prepare, unmet_gpus
from processes import Interrupted, finished

if TYPE_CHECKING:
    from lightning_ups.models.gpt import GPTConfig

SAVES = 3
RAW = 2**28  # bytes that a thread writes to learn what the machine can do


def main() -> None:
    """Start one process for each GPU and way, or be one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("checkpoint_blocking"))
    parser.add_argument("--size", choices=["tiny", "150M", "1B", "8B"], default="1B")
    parser.add_argument("--layers", type=int, help="blocks of the model, where not as many as --size has")
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--accelerator", choices=["gpu", "cpu"], default="gpu")
    parser.add_argument("--budget", type=float, default=540, help="seconds for everything")
    parser.add_argument("--folder", type=Path, help="where checkpoints go, such as /dev/shm; default: a temporary one")
    parser.add_argument("--timeout", type=float, default=240, help="seconds for each way")
    parser.add_argument("--ways", nargs="+", choices=["async", "sync"], default=["async", "sync"])
    parser.add_argument("--steps", type=int, default=24, help="of each way; there are three saves in them")
    parser.add_argument("--no-resume", dest="resume", action="store_false", help="save only")
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
        for number, way in enumerate(asked.ways):
            left = asked.budget - (time.monotonic() - start)
            share = min(asked.timeout, left / (len(asked.ways) - number))
            if share < (30 if asked.accelerator == "gpu" else 0):
                print(f"{way}: left out, {left:.0f} s of the budget are left", flush=True)
                continue
            result, interrupted = _in_processes(asked, way, timeout=share)
            results.append(result)
            print(_said(result), flush=True)
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
    if asked.steps < 2 * SAVES or asked.steps % SAVES:
        return (
            f"--steps {asked.steps} are not {SAVES} times as many as lie between saves: give {2 * SAVES}, 9, 12 or so"
        )
    if asked.accelerator == "gpu" and (lacks := unmet_gpus(1, what="this")):
        return f"{lacks}: --accelerator cpu --size tiny --seq 32 tries it out"
    folder = asked.folder or Path(tempfile.gettempdir())
    if not folder.is_dir():
        return f"--folder {folder} does not exist: name one that does, such as /dev/shm"
    needed, free = 2 * _bytes(asked), shutil.disk_usage(folder).free
    if free < needed:
        return (
            f"two checkpoints need {needed / 1e9:.0f} GB in {folder}, which has {free / 1e9:.0f} free:"
            " name another --folder, a smaller --size or fewer --layers"
        )
    return None


def _shape(asked: argparse.Namespace) -> "GPTConfig":
    """Return the shape of the model."""
    from lightning_ups.models.gpt import SIZES

    config = SIZES[asked.size]
    return replace(config, num_layers=config.num_layers if asked.layers is None else asked.layers)


def _bytes(asked: argparse.Namespace) -> int:
    """Return how large a checkpoint is: a weight and two moments of it, in float32."""
    config = _shape(asked)
    in_products = config.flops_per_token(0) // 6
    return 12 * (in_products + config.vocab_size * config.dim)


def _in_processes(asked: argparse.Namespace, way: str, *, timeout: float) -> tuple[dict[str, Any], Interrupted | None]:
    import torch

    number, interrupted = torch.cuda.device_count() if asked.accelerator == "gpu" else 1, None
    with tempfile.TemporaryDirectory(dir=asked.folder, ignore_cleanup_errors=True) as folder:
        command = [sys.executable, __file__, "--way", way, "--size", asked.size, "--seq", str(asked.seq)]
        command += ["--accelerator", asked.accelerator, "--folder", folder, "--steps", str(asked.steps)]
        command += [] if asked.layers is None else ["--layers", str(asked.layers)]
        command += [] if asked.resume else ["--no-resume"]
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
    slowest = [max(save["blocked_s"] for save in ranks) for ranks in saves]
    return found[0] | {"blocked_s_slowest_rank": slowest} | _speeds(list(found.values()))


def _speeds(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return GB/s of all ranks together: each part takes as long as on the rank that is slowest with it."""
    size = found[0]["checkpoint_gigabytes"]

    def slowest(part: str) -> list[float]:
        return [max(save[part] for save in ranks) for ranks in zip(*(one["saves"] for one in found), strict=True)]

    speeds: dict[str, Any] = {
        f"{part}_gb_per_s": [_per(size, s) for s in slowest(f"{part}_s")] for part in ("staging", "writing")
    }
    speeds["raw_write_gb_per_s"] = round(sum(one["raw_write"]["gb_per_s"] for one in found), 2)
    if "load_s" in found[0]:
        speeds["load_gb_per_s"] = _per(size, max(one["load_s"] for one in found))
    return speeds


def _per(gigabytes: float, seconds: float) -> float | None:
    return round(gigabytes / seconds, 2) if seconds > 0.001 else None  # less is nothing that was copied


def _said(result: dict[str, Any]) -> str:
    """Return the figures of one way in a line."""
    if "error" in result:
        return f"{result['way']}: failed: {result['error'].splitlines()[-1]}"
    first, *later = result["blocked_s_slowest_rank"]
    read = f", read at {result['load_gb_per_s']} GB/s" if "load_gb_per_s" in result else ""
    return (
        f"{result['way']}: {result['checkpoint_gigabytes']} GB on {result['devices']} device(s): blocked training for"
        f" {first:.2f} s at first and {statistics.median(later):.2f} s later; staged at"
        f" {result['staging_gb_per_s']} GB/s, written at {result['writing_gb_per_s']} GB/s by {result['files']} threads"
        f" a rank, which write nothing else at {result['raw_write_gb_per_s']} GB/s{read}"
    )


def _raw_write(folder: Path, *, threads: int) -> dict[str, Any]:
    """Write from memory to ``folder`` by plain threads, all ranks at the same time, and return how fast that was."""
    import torch
    import torch.distributed as dist

    content = torch.zeros(RAW if torch.cuda.is_available() else RAW // 64, dtype=torch.uint8).random_()
    view, rank = memoryview(content.numpy()), os.environ.get("RANK", "0")  # type: ignore[arg-type]

    def write(number: int) -> None:
        with (folder / f"raw_{rank}_{number}").open("wb", buffering=0) as file:
            for start in range(0, len(view), 2**23):
                file.write(view[start : start + 2**23])
            os.fsync(file.fileno())

    if dist.is_initialized():
        dist.barrier()
    started = time.monotonic()
    workers = [threading.Thread(target=write, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    elapsed = time.monotonic() - started
    for number in range(threads):
        (folder / f"raw_{rank}_{number}").unlink()
    written = threads * len(view) / 1e9
    return {"gigabytes": round(written, 3), "s": elapsed, "gb_per_s": round(written / elapsed, 2)}


def _measure(asked: argparse.Namespace) -> dict[str, Any]:
    import torch
    from lightning.pytorch import Callback, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.utils.data import DataLoader

    from lightning_ups.models.gpt import GPTModule
    from lightning_ups.strategies import FSDP2Strategy

    warnings.simplefilter("ignore")
    every = asked.steps // SAVES
    second, after = 2 * every, every - every // 2  # after the second save, and before the third
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))

    class Watch(Callback):
        def __init__(self) -> None:
            self.losses: dict[int, float] = {}
            self.times: list[float] = []

        def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, *_: Any, **__: Any) -> None:
            self.losses[trainer.global_step] = outputs["loss"].item()  # waits, so that a step's time is a step's time
            self.times.append(time.monotonic())
            if trainer.global_step == second + after and trainer.is_global_zero:
                shutil.rmtree(asked.folder / f"step={every}.ckpt", ignore_errors=True)  # whole, or the next had failed

    loads: list[float] = []

    def fit(ckpt_path: Path | None, *, save: bool) -> tuple[Watch, list[dict[str, Any]]]:
        options: dict[str, Any] = {"meta_device": True, "initialise_on": "device"}
        strategy, watch, saves = FSDP2Strategy(async_save=asked.way == "async", **options), Watch(), []
        stock, stock_load = strategy.save_checkpoint, strategy.load_checkpoint

        def loaded(*args: Any, **kwargs: Any) -> Any:
            started = time.monotonic()
            found = stock_load(*args, **kwargs)
            loads.append(time.monotonic() - started)
            return found

        def whole() -> None:
            last = strategy.checkpoints.saver.last
            if last is not None and last.total_s is not None and saves:
                waited = 0.0 if asked.way == "sync" else last.staging_s
                saves[-1] |= {"total_s": last.total_s, "writing_s": last.total_s - waited}
                print("SAVE " + json.dumps({"rank": rank, **saves[-1]}), flush=True)  # stays if the rest is cut off

        def noted(*args: Any, **kwargs: Any) -> None:
            began = time.monotonic()
            strategy.checkpoints.saver.wait()  # steps here are fewer than a run has between saves
            whole()
            started = time.monotonic()
            stock(*args, **kwargs)
            times = strategy.checkpoints.saver.last
            assert times is not None
            blocked = time.monotonic() - started
            saves.append({"blocked_s": blocked, "staging_s": times.staging_s, "waited_s": started - began})

        strategy.save_checkpoint, strategy.load_checkpoint = noted, loaded  # type: ignore[method-assign]
        savers = [ModelCheckpoint(asked.folder, filename="{step}", every_n_train_steps=every, save_top_k=-1)]
        trainer = Trainer(
            accelerator=asked.accelerator,
            devices=world,
            strategy=strategy,
            precision="bf16-mixed",
            max_steps=asked.steps,
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
        module.config = _shape(asked)
        gc.collect()  # what the first run held is not in the way of the second
        with left_on_device(module):
            rows: Any = list(tokens)
            data = DataLoader(rows, batch_size=1, shuffle=True)
            trainer.fit(module, data, ckpt_path=ckpt_path)
        whole()
        return watch, saves

    watch, saves = fit(None, save=True)
    folder = asked.folder / f"step={second}.ckpt"
    files = len([*folder.glob(f"__{rank}_*.distcp")])
    gaps = [b - a for a, b in zip(watch.times, watch.times[1:], strict=False)]
    result = {
        "way": asked.way,
        "rank": rank,
        "devices": world,
        "device": torch.cuda.get_device_name() if asked.accelerator == "gpu" else "cpu",
        "torch": version("torch"),
        "size": asked.size,
        "layers": _shape(asked).num_layers,
        "cores": len(os.sched_getaffinity(0)),
        "checkpoint_gigabytes": round(sum(file.stat().st_size for file in folder.iterdir()) / 1e9, 3),
        "saves": saves,
        "step_s_median": statistics.median(gaps),
        "step_s_while_writing_median": statistics.median(gaps[every : every + after]),
        "files": files,
        "raw_write": _raw_write(asked.folder, threads=files),
    }
    if not asked.resume:
        return result
    resumed, _ = fit(folder, save=False)
    later = [step for step in resumed.losses if step > second]
    return result | {
        "load_s": loads[-1],
        "resumed_steps": len(later),
        "largest_relative_difference_of_losses": max(
            abs(resumed.losses[step] - watch.losses[step]) / watch.losses[step] for step in later
        ),
    }


if __name__ == "__main__":
    main()
