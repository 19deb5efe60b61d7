"""What `plan` says before a run, and what the GPU says after it: peaks of memory for twelve configurations.

    python benchmarks/plan.py --budget 540 --output benchmarks/results/DATE_plan   # one GPU; with two, all twelve
    python benchmarks/plan.py --recorded                                           # no GPU: against peaks kept before

Each configuration trains five steps through a stock Trainer in a process of its own; its peak is the most that torch's
allocator gave, on rank zero. It is planned in another process, on the CPU, that sees no GPU. `UPS_BENCH_SIZE=tiny`
tries it all on any machine: without a GPU the measured column stays empty.
"""

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from cases import add_to, earlier, keep, left_on_device, prepare, unloadable
from processes import Interrupted, finished, result_of

HERE = Path(__file__).parent
RESULTS = HERE / "results"
TUNED = (
    "eager", "compile", "compile + nothing", "compile + matmuls", "compile + mm only", "compile model",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One run. Attributes are as on the command line of a user."""

    name: str
    size: str = "1B"
    seq: int = 4096
    batch: int = 4
    compile: str | tuple[str, ...] | None = None  # a scope, or patterns of blocks
    checkpoint: tuple[tuple[str, Any], ...] | None = None
    precision: str = "masters"  # or autocast, bf16-true, 32-true, float8
    strategy: str = "auto"
    sharding: str = "full"
    devices: int = 1
    accumulate: int = 1
    offload: tuple[str, ...] = ()  # optimizer, activations
    resident: float = 0.0  # of the optimizer's state
    bits: int = 32  # of each number of the optimizer's state
    layers: int | None = None  # where they are not those of the size
    chunked: bool = False  # the loss from the head's weight, without all logits
    foreign: bool = False  # transformers' Llama, with its own loss


def _saves(**options: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(options.items())


CONFIGURATIONS = (
    Configuration(name="1B eager"),
    Configuration(name="1B autocast", precision="autocast"),
    Configuration(name="1B compiled whole, bf16 weights", compile="model", precision="bf16-true"),
    Configuration(name="1B compiled, matmuls, batch 8", compile="blocks", checkpoint=_saves(save="matmuls"), batch=8),
    Configuration(name="1B nothing, seq 8192", checkpoint=_saves(save="nothing"), seq=8192, batch=4),
    Configuration(name="1B accumulated twice", batch=2, accumulate=2),
    Configuration(name="150M compiled whole, batch 64", size="150M", seq=1024, batch=64, compile="model"),
    Configuration(name="150M float32, batch 16", size="150M", seq=1024, batch=16, precision="32-true"),
    Configuration(name="Llama 1B of transformers", foreign=True, batch=2),
    Configuration(name="1B DDP, 2 GPUs", strategy="ddp", devices=2),
    Configuration(name="1B fsdp2 full, 2 GPUs", strategy="fsdp2", devices=2, compile="blocks"),
    Configuration(name="1B fsdp2 gradients, 2 GPUs", strategy="fsdp2", sharding="gradients", devices=2),
)


def recorded() -> dict[str, tuple[Configuration, float]]:
    """Return what other benchmarks measured, and their peaks in GiB."""
    compiled = "2026-11-21_compile_and_checkpoint"
    wanted: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
        name: (compiled, {"case": name}, options)
        for name, options in {
            "eager": {},
            "eager + nothing": {"checkpoint": _saves(save="nothing")},
            "eager + matmuls": {"checkpoint": _saves(save="matmuls")},
            "compile": {"compile": "blocks"},
            "compile + nothing": {"compile": "blocks", "checkpoint": _saves(save="nothing")},
            "compile + matmuls": {"compile": "blocks", "checkpoint": _saves(save="matmuls")},
            "compile + mm only": {"compile": "blocks", "checkpoint": _saves(save=["aten.mm"])},
            "compile + nothing, every 2nd": {"compile": "blocks", "checkpoint": _saves(save="nothing", every_k=2)},
            "compile + budget 0.5": {"compile": "blocks", "checkpoint": _saves(memory_budget=0.5)},
            "compile model": {"compile": "model"},
        }.items()
    }
    whole: dict[str, Any] = {"compile": "model"}
    eight: dict[str, Any] = {
        "size": "8B",
        "seq": 8192,
        "batch": 2,
        "devices": 4,
        "strategy": "fsdp2",
        "sharding": "gradients",  # as reshard_after_forward="auto" decides
        "compile": ("model.layers.*", "model.criterion"),
    }
    for row, options in {
        "150M-32": {"size": "150M", "seq": 1024, "batch": 32, **whole},
        "1B-8": {"batch": 8, **whole},
        "8B": eight,
    }.items():
        wanted[f"llama {row}"] = f"2026-11-22_llama_{row}", {"row": row, "side": "ours"}, options
    kernels = {"row": "1B-4-float8", "side": "ours, cast by kernels"}  # as all layers in float8 cast now
    wanted["llama 1B-4-float8"] = "2026-11-22_llama_1B-4-float8_lean", kernels, {"precision": "float8", **whole}
    shared: dict[str, Any] = {"strategy": "fsdp2", "compile": "blocks"}
    for name, options in {
        "1B ours, 1 GPU, batch 4": shared,
        "1B ours, 2 GPUs, batch 2": {**shared, "devices": 2, "batch": 2},
        "1B ours, gradients, 2 GPUs, batch 2": {**shared, "devices": 2, "batch": 2, "sharding": "gradients"},
    }.items():
        wanted[f"fsdp2 {name}"] = "2026-11-22_fsdp2_parity", {"name": name}, options
    name, options = "8B ours, batch 2", {**eight, **shared, "sharding": "full"}
    wanted[f"fsdp2 {name}"] = "2026-11-22_fsdp2_8B", {"name": name}, options
    for way, (folder, options) in {
        "FSDP2, eager": ("2026-11-22_simple_fsdp_1B-2", {"strategy": "fsdp2"}),
        "SimpleFSDP": ("2026-11-22_simple_fsdp_1B-2", {"strategy": "simple_fsdp"}),
        "FSDP2, blocks compiled": ("2026-11-22_simple_fsdp_1B-2_beside_compiled", shared),
    }.items():
        wanted[f"1B, 2 GPUs, {way}"] = folder, {"way": way, "cache": "cold"}, {**options, "devices": 2}
    alone: dict[str, Any] = {
        **{"size": "8B", "batch": 1, "accumulate": 32, "chunked": True, "compile": "blocks"},
        "checkpoint": _saves(save="nothing"),
    }
    folder = "2026-11-23_offload_8B"
    wanted["8B, checkpointing"] = f"{folder}_checkpointing", {"case": "checkpointing"}, alone
    moved = {**alone, "offload": ("optimizer",)}
    wanted["8B, optimizer offload"] = folder, {"case": "optimizer offload, checkpointing"}, moved
    moved = {**alone, "batch": 4, "accumulate": 8, "offload": ("optimizer", "activations")}
    wanted["8B, both kinds of offload, batch 4"] = folder, {"case": "together"}, moved
    eight_bits = {"case": "8-bit, checkpointing"}
    wanted["8B, eight bits"] = f"{folder}_one_call", eight_bits, {**alone, "bits": 8}
    once: dict[str, Any] = {**alone, "accumulate": 1}
    folder = "2026-11-23_offload_largest"
    moved = {**once, "layers": 67, "offload": ("optimizer", "activations"), "resident": 0.441}
    wanted["67 blocks, both kinds of offload"] = folder, {"case": "fits together 67"}, moved
    alone = {**once, "layers": 36, "checkpoint": None}
    wanted["36 blocks"] = folder, {"case": "largest plain"}, alone
    return {
        name: (Configuration(name=name, **options), _peak(RESULTS / folder, found))
        for name, (folder, found, options) in wanted.items()
    }


def _peak(folder: Path, wanted: Mapping[str, Any]) -> float:
    """Return the peak in GiB of the first result in ``folder`` that has what is ``wanted``."""
    lines = folder / "results.jsonl"
    results = (
        [json.loads(line) for line in lines.read_text().splitlines()]
        if lines.exists()
        else json.loads((folder / "result.json").read_text())
    )
    alike = (result for result in results if all(result.get(key) == value for key, value in wanted.items()))
    return next(result["peak_gib"] for result in alike)


def planned(config: Configuration) -> dict[str, Any]:
    """Return what the plan says of ``config``, in GiB."""
    import torch

    from lightning_ups.insight.memory import DEVICES, GIB, Planner
    from lightning_ups.order import Placement, Run

    module = _module(config)
    with torch.device("meta"):
        module.configure_model()
    run = Run(
        module=module,
        strategy=Placement.of(_strategy(config)),
        precision=_precision(config),
        callbacks=_callbacks(config),
        accelerator="cuda",
        num_devices=config.devices,
        num_nodes=1,
    )
    batch = torch.empty(config.batch, config.seq + 1, dtype=torch.long, device="meta")
    began = time.monotonic()
    planner = Planner(
        run,
        batch,
        settings={"sharding": config.sharding},
        microbatches=config.accumulate,
        device=DEVICES["h200"],
    )
    moment = planner.moment(planner.declared)
    return {
        "planned_gib": round(moment.total / GIB, 2),
        "phase": moment.phase,
        "by_kind": {kind: round(size / GIB, 2) for kind, size in moment.by_kind().items()},
        "planning_s": round(time.monotonic() - began, 1),
    }


def measured(config: Configuration) -> dict[str, Any]:
    """Train a few steps of ``config`` and return the most memory that its rank zero had, in GiB."""
    import torch
    from lightning.pytorch import Trainer, seed_everything

    from lightning_ups.data import RandomTokens

    seed_everything(0, verbose=False)
    cuda = torch.cuda.is_available()
    trainer = Trainer(
        accelerator="gpu" if cuda else "cpu",
        devices=config.devices,
        strategy=_strategy(config, name=True),
        plugins=[_precision(config)],
        callbacks=_callbacks(config),
        accumulate_grad_batches=config.accumulate,
        max_steps=5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=1.0,
        limit_val_batches=0,
    )
    data = RandomTokens(vocab_size=_vocabulary(config), seq_len=config.seq, batch_size=config.batch)
    began = time.monotonic()
    module = _module(config)
    with left_on_device(module):
        trainer.fit(module, data)
    seconds = round(time.monotonic() - began, 1)
    if not cuda:
        return {"measured_gib": None, "reserved_gib": None, "training_s": seconds}
    return {
        "measured_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 2),
        "training_s": seconds,
    }


def _module(config: Configuration) -> Any:
    from lightning_ups.models import GPTModule

    if config.foreign:
        return _llama(config)

    class Ours(GPTModule):
        def configure_optimizers(self) -> Any:
            if config.bits == 32:
                return super().configure_optimizers()
            from torchao.optim import AdamW8bit

            return AdamW8bit(self.parameters(), lr=self.lr, weight_decay=0.1)

    loss = {"loss": "chunked"} if config.chunked else {}
    module = Ours(size=config.size, lr=3e-4, warmup_steps=2, max_seq_len=config.seq, **loss)  # type: ignore[arg-type]
    if config.layers is not None:
        module.config = replace(module.config, num_layers=config.layers)
    return module


def _llama(config: Configuration) -> Any:
    import torch
    from lightning.pytorch import LightningModule
    from transformers import LlamaConfig, LlamaForCausalLM

    from lightning_ups.models import SIZES

    shape = SIZES[config.size]  # type: ignore[index]

    class Foreign(LightningModule):
        """Knows nothing of us."""

        def configure_model(self) -> None:
            if not hasattr(self, "llama"):
                self.llama = LlamaForCausalLM(
                    LlamaConfig(
                        hidden_size=shape.dim,
                        intermediate_size=shape.ffn_dim,
                        num_hidden_layers=shape.num_layers,
                        num_attention_heads=shape.num_heads,
                        num_key_value_heads=shape.num_kv_heads,
                        vocab_size=shape.vocab_size,
                        max_position_embeddings=config.seq + 1,
                        tie_word_embeddings=False,
                    )
                )

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.llama(input_ids=batch, labels=batch, use_cache=False).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=3e-4)

    return Foreign()


def _vocabulary(config: Configuration) -> int:
    from lightning_ups.models import SIZES

    return SIZES[config.size].vocab_size  # type: ignore[index]


def _precision(config: Configuration) -> Any:
    from lightning.pytorch.plugins import HalfPrecision, Precision

    from lightning_ups.precision import BF16Precision, Float8Precision

    makers: dict[str, Callable[[], Any]] = {
        "masters": lambda: BF16Precision(weights="masters"),
        "autocast": BF16Precision,
        "bf16-true": lambda: HalfPrecision("bf16-true"),
        "32-true": Precision,
        "float8": lambda: Float8Precision(recipe="tensorwise", weights="masters"),
    }
    return makers[config.precision]()


def _callbacks(config: Configuration) -> list[Any]:
    from lightning_ups.callbacks import ActivationCheckpoint, ActivationOffload, Compile, OptimizerOffload

    moves = {"optimizer": partial(OptimizerOffload, resident=config.resident), "activations": ActivationOffload}
    offloads = [moves[what]() for what in config.offload]
    scope = config.compile
    compiled = [Compile(scope=scope) if isinstance(scope, str) else Compile(blocks=scope)] if scope else []  # type: ignore[arg-type]
    return [*compiled, *([ActivationCheckpoint(**dict(config.checkpoint))] if config.checkpoint else []), *offloads]


def _strategy(config: Configuration, *, name: bool = False) -> Any:
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

    from lightning_ups.strategies import FSDP2Strategy, SimpleFSDPStrategy

    ours: dict[str, Callable[..., Any]] = {"fsdp2": FSDP2Strategy, "simple_fsdp": SimpleFSDPStrategy}
    if config.strategy in ours:
        return ours[config.strategy](sharding=config.sharding, meta_device=True, initialise_on="device")
    if name:
        return config.strategy
    return DDPStrategy if config.strategy == "ddp" else SingleDeviceStrategy


def main() -> None:
    """Plan and measure, or do one of the two for one configuration."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recorded", action="store_true", help="plan only, against peaks that were kept before")
    parser.add_argument("--only", default="", help="configurations whose name contains this")
    parser.add_argument("--budget", type=float, default=540, help="seconds in all: later configurations are left out")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        what, text = options.worker
        given = json.loads(text)
        given["checkpoint"] = given["checkpoint"] and tuple(map(tuple, given["checkpoint"]))
        given["offload"] = tuple(given["offload"])
        given["compile"] = tuple(given["compile"]) if isinstance(given["compile"], list) else given["compile"]
        config = Configuration(**given)
        figures = {"plan": planned, "measure": measured}[what](config)
        if int(os.environ.get("LOCAL_RANK", "0")) == 0:
            print("RESULT " + json.dumps(figures), flush=True)
        return
    if lacks := _unmet(options):
        parser.error(lacks)
    if options.output:
        prepare(parser, options.output)
    before, results = earlier(options.output / "result.json") if options.output else [], list[dict[str, Any]]()
    try:
        for result in _recorded(options) if options.recorded else _all(options):
            print(json.dumps(result), flush=True)
            results.append(result)
            if options.output:
                keep(options.output / "result.json", [*before, *results])
                (options.output / "table.md").write_text(_table(results) + "\n")
    finally:  # also when it is told to end
        print(_table(results), flush=True)


def _unmet(options: argparse.Namespace) -> str | None:
    """Say what is asked for and cannot be."""
    import torch

    names = [*recorded()] if options.recorded else [config.name for config in CONFIGURATIONS]
    if not any(options.only in name for name in names):
        return f"no configuration has {options.only!r} in its name: {', '.join(names)}"
    if (size := os.environ.get("UPS_BENCH_SIZE")) not in (None, "", "tiny"):
        return f"UPS_BENCH_SIZE={size} is not known: it is tiny, or not set"
    runs = torch.cuda.device_count() or size
    foreign = any(config.foreign and options.only in config.name for config in CONFIGURATIONS)
    if foreign and runs and not options.recorded and (lacks := unloadable("transformers", what="Llama")):
        return f"{lacks}; choose others by --only"
    return None


def _recorded(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    start = time.monotonic()
    for name, (config, peak) in recorded().items():
        left = options.budget - (time.monotonic() - start)
        if options.only in name and left > 0:
            found, interrupted = _child("plan", config, options, timeout=left)
            yield {"name": name, "measured_gib": peak, "tuned": name in TUNED, **found}
            if interrupted is not None:
                raise interrupted


def _all(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    import torch

    size = os.environ.get("UPS_BENCH_SIZE")
    gpus, start = torch.cuda.device_count(), time.monotonic()
    for config in CONFIGURATIONS:
        if options.only not in config.name:
            continue
        if gpus and config.devices > gpus:
            print(f"{config.name}: left out, there is one GPU", flush=True)
            continue
        if size == "tiny":
            config = replace(config, size="tiny", seq=32, batch=2, compile=None)
        left = options.budget - (time.monotonic() - start)
        if left < (40 if gpus else 0):
            print(f"{config.name}: left out, {left:.0f} s of the budget are left", flush=True)
            continue
        began, stop, interrupted = time.monotonic(), threading.Event(), None
        # Planned at the same time, so that the GPU does not wait, and kept even if the run does not fit.
        with ThreadPoolExecutor(1) as beside:
            plan = beside.submit(_child, "plan", config, options, timeout=left, gpu=False, stop=stop)
            try:
                peak, interrupted = _child("measure", config, options, timeout=left) if gpus or size else ({}, None)
                if interrupted is not None:
                    stop.set()
                said, _ = plan.result()
            except BaseException:
                stop.set()
                raise
        result = {"name": config.name, "tuned": False, **said, **peak}
        result["seconds"] = round(time.monotonic() - began, 1)
        yield result
        if interrupted is not None:
            raise interrupted


def _child(
    what: str,
    config: Configuration,
    options: argparse.Namespace,
    *,
    timeout: float,
    gpu: bool = True,
    stop: threading.Event | None = None,
) -> tuple[dict[str, Any], Interrupted | None]:
    command = [sys.executable, __file__, "--worker", what, json.dumps(asdict(config))]
    hidden, interrupted = {} if gpu else {"CUDA_VISIBLE_DEVICES": ""}, None
    try:
        text = finished(command, timeout=timeout, environment=hidden, stop=stop)
    except Interrupted as error:
        interrupted, text = error, error.said + "\nended, since the benchmark was interrupted"
    if options.output:
        add_to(options.output / "log.txt", f"===== {config.name}, {what}\n{text}\n")
    found = result_of(text)
    return {f"{what}_error": found["error"]} if "error" in found else found, interrupted


def _table(results: Sequence[Mapping[str, Any]]) -> str:
    lines = ["| configuration | planned GiB | measured GiB | error | looked at while tuning |", "|---|---|---|---|---|"]
    for result in results:
        plan, peak = result.get("planned_gib"), result.get("measured_gib")
        error = f"{plan / peak - 1:+.2%}" if plan and peak else "-"
        seen = "yes" if result["tuned"] else "no"
        lines.append(f"| {result['name']} | {plan or 'failed'} | {peak or '-'} | {error} | {seen} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
