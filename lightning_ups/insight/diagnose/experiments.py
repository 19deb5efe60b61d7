"""Experiments on one batch that stays on the device, each of which returns facts."""

import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves, tree_map

from lightning_ups._compat.lightning.running_fit import run_step, step_arguments
from lightning_ups._compat.torch.device import is_profiled
from lightning_ups._compat.torch.flags import read_tf32, save_tf32, write_tf32
from lightning_ups.insight.diagnose.links import copy_rates, matmul_rate, timed
from lightning_ups.insight.throughput import clock_for

Facts = dict[str, Any]
_MOST, _LEAST = 30, 5  # repetitions
_ALLOCATIONS = ("cudaMalloc", "cudaFree", "cudaMallocAsync", "cudaFreeAsync", "cuMemCreate", "cuMemMap", "cuMemUnmap")


class Bench:
    """Runs parts of a training step again and again, on one batch.

    Args:
        trainer: A Trainer between two steps.
        batch: A batch on the device.
        seconds: How long a comparison may take.
    """

    def __init__(self, trainer: Trainer, batch: Any, *, seconds: float) -> None:
        self.trainer, self.batch, self._seconds = trainer, batch, seconds
        self.device = trainer.strategy.root_device
        self.size = batch_size(batch)

    def full(self, batch: Any = None) -> None:
        """Run the whole step."""
        run_step(self.trainer, self.batch if batch is None else batch)

    def backward(self, batch: Any = None) -> None:
        """Run forward and backward; gradients remain."""
        self.trainer.lightning_module.zero_grad(set_to_none=True)
        arguments = step_arguments(self.trainer, self.batch if batch is None else batch)
        output = self.trainer.strategy.training_step(*arguments.values())
        loss: Any = output["loss"] if isinstance(output, Mapping) else output
        self.trainer.strategy.backward(loss, self.trainer.optimizers[0])

    def forward(self) -> None:
        """Run forward, without gradients."""
        with torch.no_grad():
            self.trainer.strategy.training_step(*step_arguments(self.trainer, self.batch).values())

    def compare(self, **runs: Callable[[], None]) -> dict[str, float]:
        """Return the seconds of each of ``runs``, which alternate so that drift cancels.

        This is the fastest run: other load on the machine only adds time.
        """
        clock = clock_for(self.device)
        times: dict[str, list[float]] = {name: [] for name in runs}

        def once() -> None:
            for name, run in runs.items():
                times[name].append(timed(clock, run))

        once()  # compiles, and allocates
        once()
        cost = sum(seconds[-1] for seconds in times.values())
        # The ranks need one number, because a step has collectives.
        rounds = self.trainer.strategy.broadcast(int(min(_MOST, max(_LEAST, self._seconds / max(cost, 1e-6)))))
        for seconds in times.values():
            seconds.clear()
        for _ in range(rounds):
            once()
        return {name: min(seconds) for name, seconds in times.items()}


def batch_size(batch: Any) -> int | None:
    """Return the number of rows that most tensors of ``batch`` have."""
    sizes = Counter(leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim)
    return sizes.most_common(1)[0][0] if sizes else None


def _resized(batch: Any, size: int, *, to: int) -> Any:
    def resize(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.ndim or leaf.shape[0] != size:
            return leaf
        return torch.cat([leaf, leaf]) if to > size else leaf[:to]

    return tree_map(resize, batch)


def parts(bench: Bench) -> Facts:
    """Time forward only, forward and backward, and the full step."""
    seconds = bench.compare(forward=bench.forward, backward=bench.backward, full=bench.full)
    facts: Facts = {f"{name}_s": value for name, value in seconds.items()}
    if bench.size:
        facts |= {"batch_size": bench.size, "device_rate": bench.size / seconds["full"]}
    return facts


def batches(bench: Bench) -> Facts:
    """Time forward and backward with half the batch and twice the batch."""
    if (size := bench.size) is None or size < 2:
        return {}
    half, twice = _resized(bench.batch, size, to=size // 2), _resized(bench.batch, size, to=2 * size)
    seconds = bench.compare(half=lambda: bench.backward(half), same=bench.backward, twice=lambda: bench.backward(twice))
    rate = {name: rows * size / seconds[name] for name, rows in (("half", 0.5), ("same", 1.0), ("twice", 2.0))}
    return {f"rate_{name}": value for name, value in rate.items()}


def optimizer(bench: Bench) -> Facts:
    """Time a fused AdamW on the same gradients, with clipping if the run clips, as a bound for any optimizer."""
    bench.backward()
    mine = bench.trainer.optimizers[0]
    kind = getattr(mine, "optimizer", mine)
    facts: Facts = {
        "optimizer_class": type(kind).__name__,
        "is_torch_optimizer": type(kind).__module__.startswith("torch.optim") and "fused" in kind.defaults,
        "is_fused": bool(kind.defaults.get("fused")),
    }
    parameters = [p for group in mine.param_groups for p in group["params"] if p.grad is not None]
    reference = torch.optim.AdamW(parameters, lr=0.0, weight_decay=0.0, fused=True)
    clips = bench.trainer.gradient_clip_val

    def step() -> None:
        if clips:
            torch.nn.utils.clip_grad_norm_(parameters, float(clips))
        reference.step()

    return facts | {"reference_optimizer_s": bench.compare(step=step)["step"]}


def exchange(bench: Bench) -> Facts:
    """Time a step with and without the exchange of gradients; the slowest rank counts."""
    if bench.trainer.world_size < 2:
        return {}

    def silent() -> None:
        with getattr(bench.trainer.strategy, "block_backward_sync", nullcontext)():
            bench.backward()

    seconds = bench.compare(exchange=bench.backward, silent=silent)
    slowest: list[Any] = [None] * bench.trainer.world_size
    dist.all_gather_object(slowest, seconds)
    worst = {name: max(each[name] for each in slowest) for name in seconds}
    return {f"{name}_s": value for name, value in worst.items()}


def tf32(bench: Bench) -> Facts:
    """Time a step with TF32 for float32 matrix products, if it is off."""
    if bench.device.type != "cuda" or torch.cuda.get_device_capability(bench.device) < (8, 0) or read_tf32().matmul:
        return {}
    restore = save_tf32()

    def fast() -> None:
        write_tf32(enabled=True)
        bench.full()
        restore()

    seconds = bench.compare(ieee=bench.full, tf32=fast)
    return {"tf32_saves_s": max(0.0, seconds["ieee"] - seconds["tf32"])}


def roofline(bench: Bench) -> Facts:
    """Profile two steps: the heaviest operators against the speed and the bandwidth of this device."""
    if is_profiled():
        return {}
    on_gpu = bench.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    bench.full()
    with (
        warnings.catch_warnings(action="ignore"),  # about events of several cycles; there is only one
        profile(activities=activities, record_shapes=True, with_flops=True) as profiler,
    ):
        bench.full()
        bench.full()
        if on_gpu:
            torch.cuda.synchronize(bench.device)
    allocations = [event for event in profiler.events() or () if event.name in _ALLOCATIONS]
    facts: Facts = {"allocation_s": sum(event.time_range.elapsed_us() for event in allocations) / 2e6} if on_gpu else {}
    rows = profiler.key_averages(group_by_input_shape=True)
    self_us = attrgetter("self_device_time_total" if on_gpu else "self_cpu_time_total")
    peak, bandwidth = matmul_rate(bench.device), copy_rates(bench.device)["memory"]
    heaviest = []
    # On a GPU, operators have the time of the kernels that they launch; kernels have rows of their own, too.
    operators = [row for row in rows if row.key.startswith("aten::") or (on_gpu and _is_launcher(row))]
    total = sum(self_us(row) for row in operators) or 1.0
    for row in sorted(operators, key=self_us, reverse=True)[:5]:
        seconds = self_us(row) / 1e6
        moved = 4.0 * sum(_numel(shape) for shape in row.input_shapes) * row.count  # about: one kind of elements
        part = {"name": row.key, "share": self_us(row) / total, "count": row.count // 2}
        if row.flops and seconds:
            bound = "compute" if row.flops / max(moved, 1.0) > peak / bandwidth else "memory"
            used = row.flops / seconds / peak if bound == "compute" else moved / seconds / bandwidth
            part |= {"bound": bound, "of_peak": used}
        elif moved and seconds and row.key.startswith("aten::") and "attention" not in row.key:
            part |= {"bound": "memory", "of_peak": moved / seconds / bandwidth}
        heaviest.append(part)
    return facts | {"operators": heaviest}


def _is_launcher(row: Any) -> bool:
    return row.device_type == torch.autograd.DeviceType.CPU and not getattr(row, "is_user_annotation", False)


def _numel(shape: Any) -> int:
    numel = 1
    for size in shape or [0]:
        numel *= size if isinstance(size, int) else 0
    return numel
