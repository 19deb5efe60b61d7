"""FSDP2Strategy beside Lightning's own ways to shard, on our GPT: speed, memory and parity of losses.

    python benchmarks/fsdp2.py --set parity --output DIR     # 1B on one and on two GPUs: the same losses
    python benchmarks/fsdp2.py --set 8B --output DIR         # 8B on four GPUs, seq 8192, batch 1 and 2, best first
    python benchmarks/fsdp2.py --set 8B-2 --output DIR       # the same on two, batch 1
    python benchmarks/fsdp2.py --set tiny                    # the same code on CPUs, in a minute

Each configuration runs in processes of its own, one for each GPU, for at most --timeout seconds, and prints one line of
JSON; the table comes last. With --rounds they take turns. Time is taken by CUDA events, and nothing waits for the
device between the first timed step and the last. All ranks see the same batches whatever their number: losses can be
compared, and the table says how far each configuration's are from the first one's.
"""

import argparse
import json
import os
import statistics
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cases import add_to, left_on_device, prepare, unmet_gpus
from processes import Interrupted, finished


@dataclass(frozen=True, kw_only=True)
class Config:
    """One run."""

    name: str
    how: str  # ours, stock-mp or stock-fsdp1
    size: str
    gpus: int
    seq: int
    batch: int  # on each GPU
    steps: int = 12
    warmup: int = 4
    compile: bool = True
    losses: bool = False  # compiled beside the blocks, where it is ours
    precision: str = "bf16-mixed"
    strategy: tuple[tuple[str, Any], ...] = ()
    accumulate: int = 1
    lr: float = 3e-4


def _sets() -> dict[str, list[Config]]:
    one = Config(name="1B ours, 1 GPU, batch 4", how="ours", size="1B", gpus=1, seq=4096, batch=4, steps=60, warmup=10)
    eight = Config(name="", how="ours", size="8B", gpus=4, seq=8192, batch=2)
    tiny = Config(name="", how="ours", size="tiny", gpus=2, seq=64, batch=2, steps=6, warmup=2, compile=False)
    ways: dict[str, dict[str, Any]] = {  # by worth, since time may be short
        "ours": {},
        "stock ModelParallel, by hand": {"how": "stock-mp"},
        "ours, the loss compiled": {"losses": True},
        "ours, gradients": {"strategy": (("sharding", "gradients"),)},
        "ours, prefetch 2": {"strategy": (("prefetch", 2),)},
        "stock FSDP1": {"how": "stock-fsdp1", "compile": False},
        "stock ModelParallel, by hand, no compile": {"how": "stock-mp", "compile": False},
    }
    too_large = ("stock FSDP1", "stock ModelParallel, by hand, no compile")  # at batch 2, for 139 GiB
    return {
        "parity": [
            one,
            replace(one, name="1B ours, 2 GPUs, batch 2", gpus=2, batch=2),
            replace(
                one, name="1B ours, gradients, 2 GPUs, batch 2", gpus=2, batch=2, strategy=(("sharding", "gradients"),)
            ),
        ],
        "8B": [
            replace(eight, name=f"8B {way}, batch {batch}", batch=batch, **options)
            for batch in (2, 1)
            for way, options in ways.items()
            if not (batch == 2 and way in too_large)
        ],
        "8B-2": [
            replace(eight, name=f"8B {way}, 2 GPUs, batch 1", gpus=2, batch=1, **options)
            for way, options in ways.items()
            if way not in too_large
        ],
        "tiny": [
            replace(tiny, name="tiny ours, 1 rank, batch 4", gpus=1, batch=4, precision="32-true"),
            replace(tiny, name="tiny ours, 2 ranks, batch 2", precision="32-true"),
            *(
                replace(tiny, name=f"tiny {way}", precision="32-true", **options)
                for way, options in ways.items()
                if way != "stock FSDP1"  # for GPUs only
            ),
        ],
    }


def main() -> None:
    """Run a set of configurations, or, under torchrun, one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=[*_sets()], default="8B")
    parser.add_argument("--only", help="run the configurations whose name contains this")
    parser.add_argument("--timeout", type=float, default=240)
    parser.add_argument("--budget", type=float, default=540, help="seconds for everything: later runs are left out")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--output", type=Path, help="keep the raw output in this folder")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        _work(Config(**{**json.loads(arguments.worker), "strategy": _pairs(arguments.worker)}))
        return
    chosen = [c for c in _sets()[arguments.set] if (arguments.only or "") in c.name]
    if lacks := _unmet(arguments, chosen):
        parser.error(lacks)
    if arguments.output:
        prepare(parser, arguments.output)
    results: list[dict[str, Any]] = []
    try:
        _run(chosen, arguments, results)
    finally:  # also when it is told to end
        print("\n" + _table(results), flush=True)


def _unmet(arguments: argparse.Namespace, chosen: list[Config]) -> str | None:
    if not chosen:
        names = ", ".join(repr(config.name) for config in _sets()[arguments.set])
        return f"no configuration of {arguments.set} has {arguments.only!r} in its name: {names}"
    if arguments.set == "tiny":
        return None
    return unmet_gpus(max(c.gpus for c in chosen), what=f"set {arguments.set}", size=chosen[0].size)


def _run(chosen: list[Config], arguments: argparse.Namespace, results: list[dict[str, Any]]) -> None:
    start, longest, failed = time.monotonic(), dict[str, float](), set[str]()
    for turn in range(1, arguments.rounds + 1):
        for config in chosen:
            left = arguments.budget - (time.monotonic() - start)
            if config.name in failed:
                print(f"{config.name}, round {turn}: left out, it failed before", flush=True)
                continue
            if left < longest.get(config.name, 20.0 if config.size == "tiny" else 60.0):
                print(f"{config.name}: left out, {left:.0f} s of the budget are left", flush=True)
                continue
            result, text, interrupted = _launch(config, min(arguments.timeout, left))
            longest[config.name] = 1.1 * result["wall_s"]
            results.append(result)
            if "error" in result:
                failed.add(config.name)
            if arguments.output:
                _keep(arguments.output, {"round": turn, **result}, text, table=_table(results))
            if interrupted is not None:
                raise interrupted


def _keep(folder: Path, result: dict[str, Any], text: str, *, table: str) -> None:
    (folder / "table.md").write_text(table + "\n")
    add_to(folder / "results.jsonl", json.dumps(result) + "\n")
    add_to(folder / "log.txt", f"===== {result['name']}\n{text}\n")


def _pairs(text: str) -> tuple[tuple[str, Any], ...]:
    return tuple((name, value) for name, value in json.loads(text)["strategy"])


def _launch(config: Config, timeout: float) -> tuple[dict[str, Any], str, Interrupted | None]:
    command = [sys.executable, __file__, "--worker", json.dumps(asdict(config))]
    began, interrupted = time.monotonic(), None
    allocator = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}  # one side needs 136 of 139 GiB
    try:
        out = finished(command, timeout=timeout, ranks=config.gpus, environment=allocator)
    except Interrupted as error:
        interrupted, out = error, error.said + "\nended, since the benchmark was interrupted"
    result = _result(out) or {"name": config.name, "error": out[-6000:]}
    result["wall_s"] = round(time.monotonic() - began, 1)
    print(json.dumps(result), flush=True)
    return result, out, interrupted


def _result(out: str) -> dict[str, Any] | None:
    for line in reversed(out.splitlines()):
        if line.startswith('{"name"'):
            with suppress(json.JSONDecodeError):  # cut off
                return json.loads(line)
    return None


def _work(config: Config) -> None:
    import torch
    import torch.distributed as dist
    from lightning.pytorch import Trainer, seed_everything

    seed_everything(1, verbose=False)
    watch = _watch(config)
    cuda = torch.cuda.is_available()
    callbacks: list[Any] = [watch]
    if config.how == "ours" and config.compile:
        from lightning_ups.callbacks import Compile

        callbacks.append(Compile(losses=config.losses))
    plugins: list[Any] = []
    if config.how == "ours" and config.precision == "bf16-mixed":
        from lightning_ups.precision import BF16Precision

        plugins.append(BF16Precision(weights="masters"))  # FSDP2's policy, as the others have it
    trainer = Trainer(
        accelerator="cuda" if cuda else "cpu",
        devices=config.gpus,
        strategy=_strategy(config),
        precision=None if plugins else "32-true" if config.how == "stock-mp" else config.precision,  # type: ignore[arg-type]
        plugins=plugins,
        max_steps=config.steps,
        accumulate_grad_batches=config.accumulate,
        # FSDP1 cannot clip by norm in Lightning's way for mixed precision; nobody clips, so that all do the same work.
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    module = _module(config)
    with left_on_device(module):
        trainer.fit(module, _batches(config))
    losses = torch.stack(watch.losses).float()
    peak = torch.tensor(float(torch.cuda.max_memory_allocated()) if cuda else 0.0, device=losses.device)
    if config.gpus > 1:
        dist.all_reduce(losses, op=dist.ReduceOp.SUM)
        losses /= config.gpus
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    if trainer.is_global_zero:
        seconds = watch.seconds()
        tokens = config.seq * config.batch * config.accumulate * (config.steps - config.warmup)
        result = {
            "name": config.name,
            "tokens_per_s_per_gpu": round(tokens / seconds, 1),
            "ms_per_step": round(1000 * seconds / (config.steps - config.warmup), 2),
            "peak_gib": round(peak.item() / 2**30, 2),
            "losses": [round(loss, 5) for loss in losses.tolist()],
            "torch": version("torch"),
            "device": torch.cuda.get_device_name() if cuda else "cpu",
        }
        print("\n" + json.dumps(result), flush=True)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def _strategy(config: Config) -> Any:
    from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy

    if config.how == "ours":
        from lightning_ups.strategies import FSDP2Strategy

        return FSDP2Strategy(meta_device=True, initialise_on="device", **dict(config.strategy))
    if config.how == "stock-mp":
        return ModelParallelStrategy(data_parallel_size=config.gpus, tensor_parallel_size=1)
    from lightning_ups.models.gpt import Block

    return FSDPStrategy(auto_wrap_policy={Block})


def _module(config: Config) -> Any:
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from lightning_ups.models.gpt import GPT, GPTModule

    class ByHand(GPTModule):
        """What a user of ModelParallelStrategy writes."""

        def configure_model(self) -> None:
            with torch.device("meta"):
                self.model = GPT(self.config)
            half = config.precision == "bf16-mixed"
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if half else MixedPrecisionPolicy()
            mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
            for block in self.model.layers:
                if config.compile:
                    block.compile()
                fully_shard(block, mesh=mesh, mp_policy=policy)
            fully_shard(self.model, mesh=mesh, mp_policy=policy)

    class Whole(GPTModule):
        """What FSDP1 wraps: built whole on each GPU."""

        def configure_model(self) -> None:
            with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
                self.model = GPT(self.config)

    kinds = {"ours": GPTModule, "stock-mp": ByHand, "stock-fsdp1": Whole}
    return kinds[config.how](
        size=config.size, max_seq_len=config.seq, lr=config.lr, schedule="constant", warmup_steps=5, fused=True
    )


def _batches(config: Config) -> Any:
    """Return this rank's part of batches that are the same for any number of ranks, and are learnt by repetition."""
    import torch
    from torch.utils.data import DataLoader

    from lightning_ups.models.gpt import SIZES

    generator = torch.Generator().manual_seed(0)
    rank, rows = int(os.environ.get("RANK", "0")), config.batch * config.gpus
    vocabulary = min(SIZES[config.size].vocab_size, 4096)  # type: ignore[index]
    different = [torch.randint(vocabulary, (rows, config.seq + 1), generator=generator) for _ in range(4)]
    mine = [batch[rank * config.batch : (rank + 1) * config.batch] for batch in different]
    count = config.steps * config.accumulate
    several: Any = [mine[i % len(mine)] for i in range(count)]
    return DataLoader(several, batch_size=None, pin_memory=torch.cuda.is_available())


def _watch(config: Config) -> Any:
    import torch
    from lightning.pytorch import Callback

    class Watch(Callback):
        """Marks the first timed step and the last, without waiting for either."""

        def __init__(self) -> None:
            self.marks: list[Any] = []
            self.losses: list[torch.Tensor] = []

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.losses.append(outputs["loss"].detach() * config.accumulate)
            if trainer.global_step in (config.warmup, config.steps):
                self.marks.append(self._mark())

        def _mark(self) -> Any:
            if not torch.cuda.is_available():
                return time.perf_counter()
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event

        def seconds(self) -> float:
            first, last = self.marks[0], self.marks[-1]
            if not torch.cuda.is_available():
                return last - first
            torch.cuda.synchronize()
            return first.elapsed_time(last) / 1000

    return Watch()


def _table(results: list[dict[str, Any]]) -> str:
    columns = "configuration | tok/s per GPU | spread | ms per step | peak GiB | first and last loss | losses off by"
    lines = [f"| {columns} |", "|---" * 7 + "|"]
    good = [result for result in results if "error" not in result]
    for name in dict.fromkeys(result["name"] for result in results):
        runs = [result for result in good if result["name"] == name]
        if not runs:
            said = next(result["error"] for result in results if result["name"] == name).strip().splitlines()
            reason = next((line.strip() for line in reversed(said) if "Error" in line or "ended" in line), "")
            lines.append(f"| {name} | {(reason or ' '.join(said[-1:]) or 'no output')[:100]} | | | | | |")
            continue
        speeds = [run["tokens_per_s_per_gpu"] for run in runs]
        median, milliseconds = statistics.median(speeds), statistics.median(run["ms_per_step"] for run in runs)
        spread, peak = (max(speeds) - min(speeds)) / median, max(run["peak_gib"] for run in runs)
        losses, base = runs[0]["losses"], good[0]["losses"]
        apart = max(abs(a - b) / abs(b) for a, b in zip(losses, base, strict=False))
        speed = f"{median:.0f} | {spread:.1%} | {milliseconds:.1f} | {peak:.1f}"
        lines.append(f"| {name} | {speed} | {losses[0]:.4f}, {losses[-1]:.4f} | {apart:.1e} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
