"""Our Trainer beside torchtitan, a bare loop and stock Lightning, on one piece of work.

    python benchmarks/llama.py --row 1B-4 --output benchmarks/results/DATE_llama_1B-4
    python benchmarks/llama.py --row 8B-float8 --sides ours torchtitan --titan PATH_OF_ITS_RUNNER
    python benchmarks/llama.py --row tiny          # on a CPU, in a minute: tries it out
    python benchmarks/llama.py --row 1B-4 --rounds 0 --output DIR   # the table of what was kept there
    python benchmarks/llama.py --row 8B --search --rounds 1 --output DIR   # torchtitan alone, by each of its settings

Every side is a process of its own, in turn, A B A B, on the same machine. All of them train the same shape with
float32 masters and moments, gradients clipped to a norm of 1 at each step, fused AdamW, random tokens, weights drawn as
torchtitan draws them, a loss logged every 10 steps. The time of a step is taken by CUDA events around it, without a
wait before the last; a run's figure is the median over its steps, a side's the median over its runs, and the table has
the spread. Beside it stands the same of the means, which see what a median does not: the steps at which a loss is read.
With several GPUs a step is as slow as on its slowest rank.

`ours` is a stock Trainer with our plugins, logger and progress bar on; on several GPUs `ours, ...` takes otherwise what
communication needs of them. `bare` is a loop by hand with the same settings and without a Trainer; `bare, torch alone`
has nothing of ours but the model. `stock` is Lightning as most use it: bf16-mixed, plain AdamW; `stock, compiled`
compiles the LightningModule; on several GPUs `stock` shards by hand in configure_model and compiles each block.
`torchtitan` is its own trainer in its best setting, run by bench_titan.sh.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import torch
from cases import add_to, prepare, unloadable, unmet_gpus
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from processes import Interrupted, finished, portable, result_of
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_ups.callbacks import AccelerationFlags, Compile, LeanProgressBar
from lightning_ups.kernels.attention import decisions, routed_attention
from lightning_ups.models.gpt import GPT, SIZES, GPTModule, Linear, Size
from lightning_ups.models.optimizer import decay_groups
from lightning_ups.optim import MasteredOptimizer, MasterWeights
from lightning_ups.order import Weights
from lightning_ups.precision import BF16Precision, Float8Precision
from lightning_ups.strategies import Communication, FSDP2Strategy
from lightning_ups.transforms.clip import clip_coefficient, total_norm
from lightning_ups.transforms.flags import PacedCollection
from lightning_ups.transforms.float8 import convert_to_float8

ON_GPU = torch.cuda.is_available()
BACKEND = "inductor" if ON_GPU else "aot_eager"
DENSE_BF16 = 989e12  # of an H100 or H200, in FLOP/s
ALLOCATOR = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}  # as torchtitan sets it; all sides have it
COLLECT_EVERY = 50  # steps from one collection of garbage to the next, as torchtitan has it; ours and loops by hand
POOL = 64  # different sequences of a rank, again and again
RUNNER = 20  # seconds that torchtitan's runner may take to end its own processes, which are no children of ours
CUT = 0.98658  # the spread of a normal distribution that is cut at three times its own, as torchtitan cuts the head's


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table.

    Args:
        size: Of our GPT.
        seq: Tokens of a sequence.
        batch: Sequences of a step on each GPU.
        gpus: How many.
        float8: Whether linear layers compute in float8, tensorwise.
        head: Whether the head does as well.
        graphs: Whether ours replays CUDA graphs.
        steps: Of a run.
        warmup: Steps that are not timed.
        sides: What is run, in this order.
        titan: What torchtitan is told for its best.
        goal: The ratio to ``against`` that ours is to reach.
        against: The side that the goal is about.
        beside: Further goals: the ratios to other sides that ours is to reach.
    """

    size: Size
    seq: int
    batch: int
    gpus: int = 1
    float8: bool = False
    head: bool = False
    graphs: bool = False
    steps: int = 40
    warmup: int = 12
    sides: tuple[str, ...] = ("ours", "torchtitan", "bare", "stock", "stock, compiled")
    titan: str = ""
    goal: float = 1.0
    against: str = "torchtitan"
    beside: tuple[tuple[str, float], ...] = ()

    @property
    def goals(self) -> tuple[tuple[str, float], ...]:
        """The ratio to reach, by side."""
        return ((self.against, self.goal), *self.beside)


def rows() -> dict[str, Row]:
    """Return the rows by name."""
    loop = (("bare", 0.99),)  # so much of its speed a Trainer is to have
    one = Row(
        size="1B",
        seq=4096,
        batch=4,
        titan="--ngpu 1 --flavor 1B --compile --seq-len 4096",
        goal=1.07,
        beside=(*loop, ("stock", 1.28)),
    )
    eight = Row(
        size="8B",
        seq=8192,
        batch=2,
        gpus=4,
        steps=20,
        warmup=6,
        titan="--ngpu 4 --flavor 8B --compile --seq-len 8192 --ac none --reshard never",
        goal=1.05,
        beside=(*loop, ("stock", 1.08)),
        sides=("ours", "torchtitan", "bare", "stock"),
    )
    # Half the GPUs, so half the batch: what four hold of weights and moments is half of what two do.
    two = replace(eight, batch=1, gpus=2, beside=loop, titan=eight.titan.replace("--ngpu 4", "--ngpu 2"))
    alone = ("ours", "bare", "bare, torch alone")
    tiny = Row(
        size="tiny", seq=64, batch=2, steps=6, warmup=2, against="bare", goal=0.1, sides=("ours", "bare", "stock")
    )
    small = Row(
        size="150M", seq=1024, batch=32, steps=120, warmup=30, sides=alone, against="bare, torch alone", beside=loop
    )
    return {
        "1B-4": one,
        "1B-8": replace(one, batch=8, goal=1.05, beside=loop, sides=("ours", "torchtitan", "bare")),
        "1B-4-float8": replace(
            one, float8=True, goal=1.15, beside=(*loop, ("stock", 1.55)), sides=("ours", "torchtitan", "bare", "stock")
        ),
        "1B-8-float8": replace(one, batch=8, float8=True, goal=1.15, beside=loop, sides=("ours", "torchtitan", "bare")),
        "1B-4-float8-head": replace(one, float8=True, head=True, goal=1.15, beside=(), sides=("ours", "torchtitan")),
        "1B-4-two": replace(
            one, gpus=2, beside=loop, titan=f"{one.titan} --ac none --reshard never".replace("ngpu 1", "ngpu 2")
        ),
        "8B": eight,
        "8B-two": two,
        "8B-two-float8": replace(two, float8=True, goal=1.08, beside=loop, sides=("ours", "torchtitan", "bare")),
        "8B-float8": replace(eight, float8=True, goal=1.08, beside=(*loop, ("stock", 1.45))),
        "150M-32": small,
        "150M-4": replace(
            small,
            batch=4,
            graphs=True,
            goal=1.1,
            beside=(),
            sides=("ours", "bare", "bare, graphs", "bare, torch alone"),
        ),
        "tiny": replace(tiny, sides=(*alone, "stock")),
        "tiny-2": replace(tiny, gpus=2),
    }


# --- what all sides have in common


class Work(GPTModule):
    """Our GPT with weights drawn as torchtitan draws them."""

    def __init__(self, row: Row, *, fused: bool = True) -> None:
        super().__init__(size=row.size, max_seq_len=row.seq, schedule="constant", warmup_steps=2, fused=fused)

    @override
    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.model = drawn_like_torchtitan(GPT(self.config))


def drawn_like_torchtitan(model: GPT) -> GPT:
    """Return ``model`` with its weights drawn with the spreads of torchtitan's Llama 3."""
    for depth, block in enumerate(model.layers):
        late = 0.02 / (2 * (depth + 1)) ** 0.5
        spreads = {"attention.qkv": 0.02, "attention.out": late, "ffn.gate": 0.02, "ffn.up": late, "ffn.down": late}
        for name, spread in spreads.items():
            linear = block.get_submodule(name)
            assert isinstance(linear, Linear)
            linear.std = spread
    model.embedding.std = 1.0
    model.head.std = CUT * model.config.dim**-0.5
    model.init_weights()  # on the meta device too: a strategy of ours repeats what happens to it there
    return model


def batches(row: Row, *, rank: int) -> list[Tensor]:
    """Return one rank's batches [batch, seq + 1], which are repeated."""
    generator = torch.Generator().manual_seed(1234 + 1000 * rank)
    tokens = torch.randint(SIZES[row.size].vocab_size, (POOL, row.seq + 1), generator=generator)
    return [*tokens[: POOL // row.batch * row.batch].split(row.batch)]


class Marks:
    """The moments between steps, on the device's clock."""

    def __init__(self) -> None:
        self._marks: list[Any] = []

    def set(self) -> None:
        """Note this moment."""
        if ON_GPU:
            self._marks.append(torch.cuda.Event(enable_timing=True))
            self._marks[-1].record()
        else:
            self._marks.append(time.perf_counter())

    def milliseconds(self) -> list[float]:
        """Return the time of each step; this waits for the device."""
        if ON_GPU:
            torch.cuda.synchronize()
            return [a.elapsed_time(b) for a, b in zip(self._marks, self._marks[1:], strict=False)]
        return [1e3 * (b - a) for a, b in zip(self._marks, self._marks[1:], strict=False)]


def figures(row: Row, marks: Marks, losses: Mapping[int, Tensor], norm: Tensor | None) -> dict[str, Any]:
    """Return the figures of one run, over all ranks."""
    milliseconds = torch.tensor(marks.milliseconds(), dtype=torch.float64)
    peak = torch.tensor(float(torch.cuda.max_memory_allocated()) if ON_GPU else 0.0)
    shown = {step: torch.as_tensor(loss).detach().float().cpu() for step, loss in losses.items()}
    if torch.distributed.is_initialized():
        group = _gloo()
        torch.distributed.all_reduce(milliseconds, torch.distributed.ReduceOp.MAX, group=group)
        torch.distributed.all_reduce(peak, torch.distributed.ReduceOp.MAX, group=group)
        for loss in shown.values():
            torch.distributed.all_reduce(loss, group=group)
            loss /= row.gpus
    timed = milliseconds[row.warmup :]
    median, mean = statistics.median(timed.tolist()), timed.mean().item()
    speed = row.batch * row.seq / median * 1e3
    return {
        "tok_s_gpu": round(speed, 1),
        "tok_s_mean": round(row.batch * row.seq / mean * 1e3, 1),
        "step_ms": round(median, 2),
        "step_ms_mean": round(mean, 2),
        "step_ms_min": round(timed.min().item(), 2),
        "step_ms_max": round(timed.max().item(), 2),
        "mfu": round(100 * speed * SIZES[row.size].flops_per_token(row.seq) / DENSE_BF16, 2),
        "peak_gib": round(peak.item() / 2**30, 2),
        "norm_first": None if norm is None else round(norm.item(), 4),
        "losses": {step: round(loss.item(), 4) for step, loss in shown.items()},
        "attention": sorted({decision["backend"] for decision in decisions()}),
        "step_ms_all": [round(value, 2) for value in milliseconds.tolist()],
    }


def _gloo() -> Any:
    """Return a group of all ranks whose collectives are of the host."""
    return torch.distributed.new_group(backend="gloo")


# --- the sides


class Watch(Callback):
    """Marks steps, keeps every tenth loss and the first norm of a Trainer's run, and waits for nothing."""

    def __init__(self, row: Row) -> None:
        self._row, self.marks, self.losses, self.norm = row, Marks(), {}, None

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.marks.set()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        tell(figures(self._row, self.marks, self.losses, self.norm))

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step == 0 and not hasattr(trainer.precision_plugin, "grad_norm"):
            gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
            self.norm = total_norm(gradients)

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 1 and self.norm is None:
            self.norm = trainer.precision_plugin.grad_norm.clone()  # type: ignore[attr-defined]
        if trainer.global_step % 10 == 1:
            self.losses[trainer.global_step] = outputs["loss"].detach().clone()


def fitted(row: Row, module: Any, *, callbacks: Sequence[Callback], **options: Any) -> None:
    """Fit ``module``, and tell the figures."""
    watch = Watch(row)
    trainer = Trainer(
        accelerator="gpu" if ON_GPU else "cpu",
        devices=row.gpus,
        max_steps=row.steps + 1,
        gradient_clip_val=1.0,
        logger=CSVLogger(os.environ.get("LLAMA_LOGS", "runs/llama")),
        log_every_n_steps=10,
        callbacks=[*callbacks, watch],
        enable_checkpointing=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **options,
    )
    mine = batches(row, rank=int(os.environ.get("RANK", "0")))
    loader = DataLoader(
        [mine[i % len(mine)] for i in range(row.steps + 1)], batch_size=None, pin_memory=ON_GPU  # type: ignore[arg-type]
    )  # fmt: skip
    trainer.fit(module, loader)


def ours(row: Row, *, weights: Weights = "masters", **options: Any) -> None:
    """Run a stock Trainer with our plugins; ``options`` are of the strategy."""
    precision = BF16Precision(weights=weights)
    if row.float8:
        precision = Float8Precision(recipe="tensorwise", head=row.head, weights=weights, emulate=not ON_GPU)
    compiled = Compile(scope="model", mode="reduce-overhead" if row.graphs else "default", backend=BACKEND)
    flags = AccelerationFlags(attention="auto", gc_interval=COLLECT_EVERY)
    strategy: Any = "auto"
    if row.gpus > 1:
        strategy = FSDP2Strategy(reshard_after_forward="auto", meta_device=True, initialise_on="device", **options)
        compiled = Compile(blocks=["model.layers.*", "model.criterion"], backend=BACKEND)  # as torchtitan does
    callbacks = [flags, LeanProgressBar(refresh_rate=10), compiled]
    fitted(row, Work(row), callbacks=callbacks, plugins=[precision], strategy=strategy)


def stock(row: Row, *, compiled: bool = False) -> None:
    """Run Lightning as most use it."""
    if row.gpus > 1:
        stock_sharded(row)
        return
    module: Any = Work(row, fused=False)
    if compiled:
        with torch.device("cuda" if ON_GPU else "cpu"):
            module.configure_model()
        module = torch.compile(module)
    fitted(row, module, callbacks=[], precision="bf16-mixed")


def stock_sharded(row: Row) -> None:
    """Run Lightning's ModelParallelStrategy with what its users write by hand."""
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    class ByHand(Work):
        @override
        def configure_model(self) -> None:
            with torch.device("meta"):
                self.model = drawn_like_torchtitan(GPT(self.config))
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
            mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
            for block in self.model.layers:
                if ON_GPU:
                    block.compile()
                fully_shard(block, mesh=mesh, mp_policy=policy)
            fully_shard(self.model, mesh=mesh, mp_policy=policy)

    strategy = ModelParallelStrategy(data_parallel_size=row.gpus, tensor_parallel_size=1)
    fitted(row, ByHand(row), callbacks=[], strategy=strategy, precision="32-true")


def by_hand(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of a loop by hand."""
    groups = decay_groups(model.parameters(), weight_decay=0.1)
    return torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), fused=ON_GPU or None)


def bare(row: Row, *, graphs: bool = False) -> None:
    """Run a loop by hand with our settings; CUDA graphs are a side of their own."""
    if row.gpus > 1:
        bare_sharded(row)
        return
    device = torch.device("cuda" if ON_GPU else "cpu")
    with device:  # a CPU takes its time to draw
        model = drawn_like_torchtitan(GPT(replace(SIZES[row.size], max_seq_len=row.seq)))
    if row.float8:
        convert_to_float8(model, recipe="tensorwise", head=row.head, emulate=not ON_GPU)
    masters = MasterWeights(model, dtype=torch.bfloat16)
    inner = by_hand(model)
    optimizer = MasteredOptimizer(inner, masters)
    forward: Callable[..., Tensor] = model
    if ON_GPU:
        forward = torch.compile(model, mode="reduce-overhead" if graphs else None)

    def clipped() -> Tensor:
        norm = total_norm(optimizer.gradients())
        optimizer.take_clip_coefficient(clip_coefficient(norm, max_norm=1.0))
        return norm

    with routed_attention("auto"):
        looped(row, forward, clipped, optimizer, device=device, graphs=graphs)


def bare_of_torch(row: Row) -> None:
    """Run a loop by hand with nothing of ours but the model: autocast, AdamW fused, clipping and attention by torch."""
    device = torch.device("cuda" if ON_GPU else "cpu")
    with device:
        model = drawn_like_torchtitan(GPT(replace(SIZES[row.size], max_seq_len=row.seq)))
    optimizer = by_hand(model)
    compiled = torch.compile(model) if ON_GPU else model

    def forward(tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            return compiled(tokens, targets)

    def clipped() -> Tensor:
        return nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)

    looped(row, forward, clipped, optimizer, device=device)


def bare_sharded(row: Row) -> None:
    """Run a loop by hand over FSDP2, blocks compiled."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import DTensor

    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", rank) if ON_GPU else torch.device("cpu")
    if ON_GPU:
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device.type, (row.gpus,))
    with torch.device("meta"):
        model = drawn_like_torchtitan(GPT(replace(SIZES[row.size], max_seq_len=row.seq)))
    if row.float8:
        convert_to_float8(model, recipe="tensorwise", head=row.head, all_gather=True, emulate=not ON_GPU)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in model.layers:
        if ON_GPU:
            block.compile()
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    if ON_GPU:
        model.criterion.compile()
    model.to_empty(device=device)
    model.init_weights()
    optimizer = by_hand(model)

    def clipped() -> Tensor:
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    afterwards: list[Callable[[], None]] = []
    if row.float8:
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        afterwards.append(partial(precompute_float8_dynamic_scale_for_fsdp, model))
    with routed_attention("auto"):
        looped(row, model, clipped, optimizer, device=device, afterwards=afterwards)


def looped(
    row: Row,
    forward: Callable[..., Tensor],
    clipped: Callable[[], Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    device: torch.device,
    graphs: bool = False,
    afterwards: Sequence[Callable[[], None]] = (),
) -> None:
    """Run the steps, and tell the figures."""
    pinned = [batch.pin_memory() if ON_GPU else batch for batch in batches(row, rank=int(os.environ.get("RANK", "0")))]
    marks, losses, first = Marks(), Losses(), None
    with PacedCollection(COLLECT_EVERY) as collection:
        for step in range(row.steps + 1):
            marks.set()
            if graphs:
                torch.compiler.cudagraph_mark_step_begin()
            batch = pinned[step % len(pinned)].to(device, non_blocking=True)
            loss = forward(batch[:, :-1], batch[:, 1:])
            loss.backward()
            norm = clipped()
            optimizer.step()
            for task in afterwards:
                task()
            optimizer.zero_grad()
            if step == 0:
                first = norm.clone()
            if step % 10 == 0:
                losses.log(step + 1, loss)
            collection.after_batch()
    tell(figures(row, marks, losses.kept, first))


class Losses:
    """The losses that a loop by hand logs, each printed when the next one is logged, for which it waits for nothing."""

    def __init__(self) -> None:
        self.kept: dict[int, Tensor] = {}
        self._event: torch.cuda.Event | None = None

    def log(self, step: int, loss: Tensor) -> None:
        """Print the loss before this one, and send for this one."""
        if self._event is not None:
            self._event.synchronize()  # it has passed, unless the host is that many steps ahead
        for last in [*self.kept][-1:]:
            print(f"step {last}: loss {self.kept[last].item():.4f}", flush=True)
        loss = loss.detach()
        self.kept[step] = loss.to("cpu", non_blocking=True) if ON_GPU else loss.clone()  # the first is pinned
        if ON_GPU:
            self._event = torch.cuda.Event()
            self._event.record()


def ours_copied_within(row: Row) -> None:
    """Run ours with what was gathered copied into the parameters in the stream that computes, as torch does."""
    with patch("lightning_ups.strategies.fsdp2.copying_beside", nullcontext):
        ours(row)


OF_COMMUNICATION: Mapping[str, Callable[[Row], None]] = {  # what the strategy says, or could, of it
    "ours, copied within": ours_copied_within,
    "ours, 8 multiprocessors": partial(ours, communication=Communication(multiprocessors=8)),
    "ours, 4 multiprocessors": partial(ours, communication=Communication(multiprocessors=4)),
}
SIDES: Mapping[str, Callable[[Row], None]] = {
    "ours": ours,
    "ours, autocast": partial(ours, weights="autocast"),
    **OF_COMMUNICATION,
    "bare": bare,
    "bare, graphs": partial(bare, graphs=True),
    "bare, torch alone": bare_of_torch,
    "stock": stock,
    "stock, compiled": partial(stock, compiled=True),
}


# --- running them


def work(side: Callable[[Row], None], row: Row) -> NoReturn:
    """Run one side in this process, and end it, whatever it still has to tidy up or to wait for."""
    seed_everything(1, verbose=False)
    try:
        side(row)
    except BaseException:  # noqa: BLE001  (the other ranks wait for this one to end)
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    raise AssertionError("a side ends by `tell`")


def tell(found: Mapping[str, Any]) -> NoReturn:
    """Print what was found, on one rank, when all have come so far, and end this process."""
    if int(os.environ.get("RANK", "0")) == 0:
        print("\nRESULT " + json.dumps(found), flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(torch.zeros(1), group=_gloo())
    sys.stderr.flush()
    # Not by `return`: Lightning would bring the model and the optimizer's state to the host first.
    os._exit(0)


def main() -> None:
    """Run a row, or one side of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", choices=rows(), required=True)
    parser.add_argument("--sides", nargs="*", choices=[*SIDES, "torchtitan"], help="only these")
    parser.add_argument("--search", action="store_true", help="run torchtitan by each of its settings, and no other")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--budget", type=float, default=570, help="seconds for everything: later runs are left out")
    parser.add_argument("--timeout", type=float, default=150, help="seconds for one run")
    parser.add_argument("--output", type=Path, default=Path("runs/llama"), help="where the raw output is kept")
    parser.add_argument("--titan", type=Path, default=Path(".gpu/titan"), help="the folder of bench_titan.sh")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    options = parser.parse_args()
    row = rows()[options.row]
    if options.side:
        work(SIDES[options.side], row)
    if options.search and options.sides:
        parser.error("--search runs sides of its own: leave --sides out")
    sides = [*titans(row)] if options.search else options.sides or row.sides
    if options.rounds and (lacks := unmet(row, options.row, sides, options.titan)):
        parser.error(lacks)
    if options.rounds:
        prepare(parser, options.output)
    results = kept(options.output, options.row)
    try:
        for result in run(options.row, sides, options):
            results.append(result)
            (options.output / "table.md").write_text(table(options.row, results) + "\n")
    finally:  # also when it is told to end
        print(table(options.row, results), flush=True)


def unmet(row: Row, name: str, sides: Iterable[str], runner: Path) -> str | None:
    """Say what ``sides`` of ``row`` need and is not there."""
    sides = list(sides)
    asks_titan = any(map(is_titan, sides))
    if asks_titan and not (runner / "bench_titan.sh").is_file():
        path = runner / "bench_titan.sh"
        return f"torchtitan runs by {path}, which does not exist: name the folder by --titan, or other --sides"
    if (asks_titan or not sides) and not row.titan:
        return f"there is no setting of torchtitan for row {name}: name other --sides"
    if (row.gpus == 1 or not ON_GPU) and (asked := [side for side in sides if side in OF_COMMUNICATION]):
        return f"side {asked[0]!r} is about what GPUs say to one another: name a row of several, on GPUs"
    if "bare, torch alone" in sides and (row.gpus > 1 or row.float8):
        return "side 'bare, torch alone' is for one GPU and bfloat16: name another row, or other sides"
    if (ON_GPU or row.size != "tiny") and (lacks := unmet_gpus(row.gpus, what=f"row {name}", size=row.size)):
        return lacks
    if row.float8 and (lacks := unloadable("torchao.float8", what=f"row {name}")):
        return lacks
    if ON_GPU and find_spec("flash_attn") is None:
        print("Note: flash-attn-4 is not installed; sides of ours and bare take the next best attention.", flush=True)
    return None


def kept(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return what earlier calls have kept of a row on this kind of device."""
    path = folder / "results.jsonl"
    found: list[dict[str, Any]] = []
    for line in path.read_text().splitlines() if path.exists() else ():
        with suppress(json.JSONDecodeError):  # cut off, since the call that wrote it was killed
            found.append(json.loads(line))
    return [one for one in found if one["row"] == name and (one.get("gpu", True) or not ON_GPU)]


def run(name: str, sides: Iterable[str], options: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """Run the sides in turn, round after round, while the budget lasts, and yield what each found."""
    start, longest, failed = time.monotonic(), dict[str, float](), set[str]()
    call = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
    first = 45 if rows()[name].gpus == 1 else 80  # seconds, of a side that has not run yet
    for turn in range(1, options.rounds + 1):
        for side in sides:
            left = options.budget - (time.monotonic() - start)
            if side in failed:
                print(f"{side}, round {turn}: left out, it failed before", flush=True)
                continue
            if left < longest.get(side, first) + (RUNNER if is_titan(side) else 0):
                print(f"{side}, round {turn}: left out, {left:.0f} s of the budget are left", flush=True)
                continue
            began, limit = time.monotonic(), min(left, options.timeout)
            interrupted = None
            try:
                result, text = titan(side, rows()[name], options, limit) if is_titan(side) else child(name, side, limit)
            except Interrupted as error:
                interrupted, text = error, error.said
                result = {"error": "interrupted"}
            longest[side] = 1.1 * (time.monotonic() - began)
            asked = {"row": name, "side": side, "round": turn, "gpu": ON_GPU, "call": call}
            result = {**asked, "seconds": round(time.monotonic() - began, 1), **result}
            add_to(options.output / "results.jsonl", json.dumps(result) + "\n")
            add_to(options.output / "log.txt", f"===== {side}, round {turn}\n{text}\n")
            print(json.dumps({key: value for key, value in result.items() if key != "step_ms_all"}), flush=True)
            if "error" in result:
                failed.add(side)
            yield result
            if interrupted is not None:
                raise interrupted


def child(name: str, side: str, timeout: float) -> tuple[dict[str, Any], str]:
    """Run one side in a process of its own, or in one for each GPU."""
    command = [sys.executable, __file__, "--row", name, "--side", side]
    text = finished(command, timeout=timeout, ranks=rows()[name].gpus, environment=ALLOCATOR)
    return result_of(text), text


def titans(row: Row) -> dict[str, str]:
    """Return the settings of torchtitan that its best is searched among, as it is told them; the last word counts."""
    if not row.titan:
        return {}
    option, words = (
        ("--single-gpu", ("amp", "fsdp")) if row.gpus == 1 else ("--reshard", ("default", "always", "never"))
    )
    return {
        f"torchtitan, {kept} checkpointing, {option.strip('-')} {word}": f"--ac {kept} {option} {word}"
        for kept in ("none", "selective", "full")
        for word in words
    }


def is_titan(side: str) -> bool:
    """Return whether torchtitan runs this side."""
    return side.split(",")[0] == "torchtitan"


def titan(side: str, row: Row, options: argparse.Namespace, timeout: float) -> tuple[dict[str, Any], str]:
    """Run torchtitan by its runner."""
    words = [
        *row.titan.split(),
        *titans(row).get(side, "").split(),
        "--local-batch-size",
        str(row.batch),
        "--steps",
        str(row.steps),
    ]
    words += ["--warmup", str(row.warmup), "--log-freq", "10"]
    if row.float8:
        words += ["--float8", "tensorwise", *(["--float8-filter", ""] if row.head else [])]
    command = ["bash", str(options.titan / "bench_titan.sh"), *words]
    with tempfile.TemporaryDirectory() as folder:
        environment = {"OUT": folder, "BT_TIMEOUT": str(max(round(timeout - RUNNER), 1))}
        text = finished(command, timeout=timeout, environment=environment)
        if (log := Path(folder) / "titan.log").exists():
            text += portable(log.read_text(errors="replace"))
    for line in text.splitlines():
        if line.startswith("RESULT_JSON ") and line.endswith("}"):  # else it was cut off
            found = json.loads(line.removeprefix("RESULT_JSON "))
            if "error" in found:
                return {"error": found["error"]}, text
            return {
                "tok_s_gpu": found["tok_s_gpu"],
                "tok_s_mean": found.get("tok_s_gpu_mean"),
                "step_ms": found["step_ms"],
                "mfu": round(100 * found["tok_s_gpu"] * SIZES[row.size].flops_per_token(row.seq) / DENSE_BF16, 2),
                "peak_gib": found["peak_alloc_gib"],
                "norm_first": first_norm(text),
                "losses": found["losses"],
                "all": found,
            }, text
    return {"error": text.strip()[-800:]}, text


def first_norm(said: str) -> float | None:
    """Return the norm that torchtitan printed at its first step."""
    for line in said.splitlines():
        if "step:  1 " in line and "grad_norm:" in line:
            return float(line.partition("grad_norm:")[2].split()[0])
    return None


READS = {
    **dict.fromkeys(("ours", "ours, autocast", *OF_COMMUNICATION), "logger and bar, when it is there"),
    "torchtitan": "its own metrics, at once",
    "bare": "printed ten steps later",
    "bare, graphs": "printed ten steps later",
    "bare, torch alone": "printed ten steps later",
    "stock": "logger, at once",
    "stock, compiled": "logger, at once",
}  # how each side reads the loss that it logs every 10 steps


def table(name: str, results: Sequence[Mapping[str, Any]]) -> str:
    """Return the row's table: medians, spreads, ratios of ours to each side, by medians and by means, and the goal."""
    row, speeds, means = rows()[name], {}, {}
    kept: dict[str, Mapping[str, Any]] = {}
    for result in results:
        if "tok_s_gpu" in result:
            speeds.setdefault(result["side"], []).append(result["tok_s_gpu"])
            if (mean := by_mean(row, result)) is not None:
                means.setdefault(result["side"], []).append(mean)
            kept[result["side"]] = result
    columns = (
        "side", "tok/s per GPU", "spread", "MFU", "peak GiB", "first norm", "ours is", "tok/s by the mean", "ours is",
        "its loss every 10 steps",
    )  # fmt: skip
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for side, runs in speeds.items():
        median, last = statistics.median(runs), kept[side]
        spread = (max(runs) - min(runs)) / median
        cells = (f"{median:.0f}", f"{spread:.1%}", f"{last['mfu']} %", last["peak_gib"], last["norm_first"])
        mean = f"{statistics.median(means[side]):.0f}" if side in means else ""
        cells += (ratio_of(speeds, side), mean, ratio_of(means, side))
        cells += (READS["torchtitan" if is_titan(side) else side],)
        lines.append(f"| {side} | {' | '.join(map(str, cells))} |")
    norms = [last["norm_first"] for last in kept.values() if last["norm_first"]]
    if len(norms) > 1:
        apart = max(norms) / min(norms) - 1
        lines.append(f"\nThe first norms are {apart:.2%} apart{'' if apart < 0.01 else ': the sides differ'}.")
    if searched := {side: statistics.median(speeds[side]) for side in titans(row) if side in speeds}:
        best = max(searched, key=lambda side: searched[side])
        lines.append(f"\nThe best of {len(searched)} of {len(titans(row))} settings: {best}.")
        if "torchtitan" in speeds:
            share = statistics.median(speeds["torchtitan"]) / searched[best]
            lines.append(f"What stands for torchtitan in this row has {share:.3f} of its speed.")
    for against, goal in row.goals:
        if "ours" in speeds and against in speeds:
            ratio = statistics.median(speeds["ours"]) / statistics.median(speeds[against])
            verdict = "reached" if ratio >= goal else "missed"
            lines.append(f"\n{name}: {ratio:.3f} of {against}; the goal of {goal:.2f} is {verdict}.")
            if by_means := ratio_of(means, against):
                lines[-1] += f" By the means it is {by_means}."
    if (calls := len({result.get("call") for result in results})) > 1:
        lines.append(f"\nThese are runs of {calls} calls, perhaps on different machines of one kind.")
    return "\n".join(lines)


def ratio_of(speeds: Mapping[str, Sequence[float]], side: str) -> str:
    """Return how many times as fast as ``side`` ours is."""
    if "ours" not in speeds or side not in speeds:
        return ""
    return f"{statistics.median(speeds['ours']) / statistics.median(speeds[side]):.3f}x"


def by_mean(row: Row, result: Mapping[str, Any]) -> float | None:
    """Return a run's tokens a second by the mean of its steps, where its steps were kept."""
    if told := result.get("tok_s_mean", result.get("all", {}).get("tok_s_gpu_mean")):
        return told
    if timed := result.get("step_ms_all", [])[row.warmup :]:  # kept before there was a mean
        return row.batch * row.seq / statistics.mean(timed) * 1e3
    return None


if __name__ == "__main__":
    main()
