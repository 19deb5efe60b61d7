"""The figures of a run against thresholds, and what to change first."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from lightning_ups._compat.environment import usable_cores
from lightning_ups.insight.throughput.meter import Summary

_LEAST_STEPS, _LEAST_SECONDS = 50, 30  # one of them, for advice
_MUCH_LOOP = 0.25  # of a step


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """A threshold of a healthy run.

    Args:
        name: The figure.
        value: Its measured value.
        wanted: The threshold, as text.
        passed: Whether it is reached.
        note: What the value means.
    """

    name: str
    value: float
    wanted: str
    passed: bool
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bottleneck:
    """Something that costs time.

    Args:
        name: One or two words.
        lost: The share of a step's time that could be saved at most.
        what: The evidence, with figures.
        change: What to do.
    """

    name: str
    lost: float
    what: str
    change: str


def checks(summary: Summary) -> list[Check]:
    """Return the thresholds of what was measured in ``summary``."""
    used = _used_memory(summary)
    unsure = f"{summary.steps} steps are too few to say why" if is_short(summary) else ""
    note = "" if used is None or 0.8 <= used <= 0.95 else "room for a larger batch" if used < 0.8 else "near OOM"
    found: list[tuple[str, float | None, str, Callable[[float], bool], str]] = [
        ("GPU utilisation", summary.gpu.get("utilisation"), ">= 80 %", lambda v: v >= 0.8, ""),
        ("GPU memory", used, "80-95 %", lambda v: 0.8 <= v <= 0.95, note),
        ("waiting for data", summary.split.get("data"), "<= 5 %", lambda v: v <= 0.05, _data_note(summary)),
        ("exposed communication", _exposed_communication(summary), "<= 15 %", lambda v: v <= 0.15, ""),
        ("MFU", summary.utilisation.get("mfu"), ">= 50 %", lambda v: v >= 0.5, ""),
        ("scaling efficiency", summary.scaling, ">= 80 %", lambda v: v >= 0.8, ""),
    ]
    return [
        Check(name=name, value=value, wanted=wanted, passed=passed, note=note or ("" if passed else unsure))
        for name, value, wanted, is_good, note in found
        if value is not None
        for passed in (is_good(round(value, 3)),)  # as it is printed
    ]


def _data_note(summary: Summary) -> str:
    """Return what to do about a slow loader where something else is to change first."""
    first = first_change(summary)
    if first is None or first.name == "slow loader":
        return ""
    return next((re.split(r" \(|:", each.change)[0] for each in _data(summary) if each.name == "slow loader"), "")


def unmeasured(summary: Summary) -> list[str]:
    """Return what was not measured and could have been on these devices, each with what it needs."""
    several = summary.num_devices > 1
    cures = {
        "GPU utilisation (pip install nvidia-ml-py)": summary.memory and "utilisation" not in summary.gpu,
        "exposed communication (set inspect_at)": several
        and summary.memory
        and _exposed_communication(summary) is None,
        "scaling efficiency (set single_device)": several and summary.scaling is None,
    }
    return [cure for cure, is_missing in cures.items() if is_missing]


def _exposed_communication(summary: Summary) -> float | None:
    look = summary.inspection
    return look.exposed_communication if look is not None and summary.num_devices > 1 else None


def _used_memory(summary: Summary) -> float | None:
    memory = summary.memory
    return memory["reserved"] / memory["total"] if memory.get("total") else None


def bottlenecks(summary: Summary) -> list[Bottleneck]:
    """Return what costs time in the run, the most expensive first."""
    sources = (_idle_gpu, _data, _loop, _uneven_steps, _other_ranks, _hardware, _outside_steps)
    return sorted((each for source in sources for each in source(summary)), key=lambda each: -each.lost)


def is_short(summary: Summary) -> bool:
    """Return whether the run was too short to advise on."""
    return summary.steps < _LEAST_STEPS and (summary.fit_s or 0) < _LEAST_SECONDS


def first_change(summary: Summary) -> Bottleneck | None:
    """Return what to change first, or None if nothing that was measured is worth it, or too little was measured."""
    if is_short(summary):
        return None
    if found := bottlenecks(summary):
        return found[0]
    mfu, used = summary.utilisation.get("mfu"), _used_memory(summary)
    if mfu is not None and mfu >= 0.5:
        return None
    if used is not None and used < 0.8:
        return Bottleneck(
            name="batch too small",
            lost=0.0,
            what=f"the GPU is busy, but {1 - used:.0%} of its memory is free"
            + ("" if mfu is None else f", and MFU is {mfu:.0%}"),
            change="raise the batch size until 80 to 95 % of the memory is used",
        )
    if mfu is None:
        return None
    return Bottleneck(
        name="slow kernels",
        lost=0.0,
        what=("" if used is None else "the GPU is busy and its memory used, but ") + f"MFU is {mfu:.0%}",
        change=_lacking(
            summary,
            "compile (Compile)",
            "use bfloat16 (BF16Precision)",
            "use float8 (Float8Precision)",
            "use fused attention",
        ),
    )


def _lacking(summary: Summary, *changes: str) -> str:
    """Return those of ``changes`` that name no part of the run."""
    parts = {*summary.hints.get("parts", ())}
    return ", ".join(change for change in changes if not parts & {*re.findall(r"\w+", change)})


def _data(summary: Summary) -> Iterator[Bottleneck]:
    if round(share := summary.split.get("data", 0.0), 3) > 0.05:
        workers = summary.hints.get("num_workers")
        now = "" if workers is None else f", with num_workers={workers}"
        yield Bottleneck(
            name="slow loader",
            lost=share,
            what=f"{share:.0%} of each step is spent waiting for the next batch{now}",
            change=_more_workers(workers, cores=_cores_per_rank(summary)),
        )
    if (share := summary.split.get("transfer", 0.0)) < 0.05:
        return
    hooks = summary.hints.get("batch_hooks", ())
    if hooks or summary.on_cpu:  # a CPU has no copy to wait for
        copies = "" if summary.on_cpu else ", with the copy to the device"
        yield Bottleneck(
            name="slow batch hooks",
            lost=share,
            what=f"{share:.0%} of each step is spent in {' and '.join(hooks) or 'the hooks of the batch'}{copies}",
            change="do less there, such as encoding or augmenting: do it once ahead of training, or in the dataset"
            " with num_workers. A cache that the first epoch fills is slow in this epoch alone",
        )
    else:
        unpinned = summary.hints.get("pin_memory") is False
        yield Bottleneck(
            name="slow transfer",
            lost=share,
            what=f"{share:.0%} of each step is spent copying the batch to the device",
            change="set pin_memory=True in the DataLoader" if unpinned else "send smaller dtypes and fewer tensors",
        )


def _more_workers(workers: int | None, *, cores: int) -> str:
    if workers is not None and workers >= cores:
        all_busy = (
            f"there is a worker for each of the {cores} usable cores" if cores > 1 else "a worker has the only core"
        )
        return f"prepare the data ahead of training or more cheaply: {all_busy}"
    more = "raise num_workers" if workers else "set num_workers of the DataLoader"
    return (
        f"{more} (to at most {cores}, the usable cores), raise prefetch_factor, or prepare the data ahead of training"
    )


def _cores_per_rank(summary: Summary) -> int:
    ranks_here = min(summary.num_devices, torch.cuda.device_count() or summary.num_devices)
    return max(1, usable_cores() // ranks_here)


def _loop(summary: Summary) -> Iterator[Bottleneck]:
    idle = (summary.inspection.idle or 0.0) if summary.inspection else 0.0  # has advice of its own
    if (share := summary.split.get("other", 0.0) - idle) < _MUCH_LOOP:
        return
    every, callbacks = summary.hints.get("log_every_n_steps"), summary.hints.get("batch_callbacks", ())
    yield Bottleneck(
        name="slow loop",
        lost=share,
        what=f"{share:.0%} of each step is spent in the loop, in logging and in callbacks",
        change=(f"log less often (log_every_n_steps={every} now), " if every else "")
        + "do less after each batch in "
        + (", ".join(callbacks) or "callbacks")
        + ", or raise the batch size if steps are short",
    )


def _without_data(summary: Summary, share: float) -> float:
    """Return ``share`` without what the loader and the copies account for."""
    return share - summary.split.get("data", 0.0) - summary.split.get("transfer", 0.0)


def _uneven_steps(summary: Summary) -> Iterator[Bottleneck]:
    uneven = _without_data(summary, summary.uneven) - sum(each.lost for each in _loop(summary))
    if summary.steps >= 20 and uneven >= 0.1 and summary.step_s and summary.step_p95_s:
        yield Bottleneck(
            name="uneven steps",
            lost=uneven,
            what=f"step times vary: {uneven:.0%} of the time is in excess of the median step,"
            f" and the 95th percentile is {summary.step_p95_s / summary.step_s:.1f} times the median",
            change="look for work in some steps only: "
            + _lacking(summary, "garbage collection (AccelerationFlags(gc_interval=100))", "recompilation", "logging")
            + ", callbacks; and for other load on the machine",
        )


def _idle_gpu(summary: Summary) -> Iterator[Bottleneck]:
    look = summary.inspection
    if look is None or look.idle is None or (idle := _without_data(summary, look.idle)) < 0.05:
        return
    what, used = f"the GPU is idle for {idle:.0%} of a step", _used_memory(summary)
    if look.waits:
        where, count = look.waits[0]
        others = f" and {len(look.waits) - 1} more places" if len(look.waits) > 1 else ""
        yield Bottleneck(
            name="host sync",
            lost=idle,
            what=f"{what}, and the host waits for it at {where} ({count}x a step){others}",
            change="do not read GPU values in a step (.item(), print, if on a tensor, .cpu()); log tensors instead",
        )
    elif used is not None and used < 0.8:
        yield Bottleneck(
            name="batch too small",
            lost=idle,
            what=f"{what}: the host cannot launch such small kernels fast enough, and {1 - used:.0%} of the memory is"
            " free",
            change="raise the batch size; then compile (Compile(mode='auto') uses CUDA graphs where they are faster)",
        )
    else:
        yield Bottleneck(
            name="slow host",
            lost=idle,
            what=f"{what}: the host launches kernels too slowly",
            change=_lacking(summary, "compile (Compile)", "use a fused optimizer", "log less often"),
        )


def _other_ranks(summary: Summary) -> Iterator[Bottleneck]:
    exposed = (summary.inspection.exposed_communication or 0.0) if summary.inspection else 0.0
    if summary.num_devices > 1 and exposed >= 0.15:
        yield Bottleneck(
            name="slow exchange",
            lost=exposed,
            what=f"{exposed:.0%} of a step is exposed communication",
            change="accumulate gradients (accumulate_grad_batches), shard less (sharding='gradients', replicate_size),"
            " and check the links (python -m lightning_ups doctor; NCCL_DEBUG=INFO)",
        )
    slowest = None if summary.on_cpu else summary.slowest_rank  # ranks on CPUs share cores
    if slowest is not None and slowest[1] >= 0.1:
        rank, more = slowest
        yield Bottleneck(
            name="slow rank",
            lost=summary.waited_for,
            what=f"rank {rank} takes {more:.0%} longer than the others for its own part of a step, and all wait for it",
            change="check that machine: its clocks, disk, loader and other load",
        )


def _hardware(summary: Summary) -> Iterator[Bottleneck]:
    clock, most = summary.gpu.get("clock_mhz"), summary.gpu.get("max_clock_mhz")
    if slowed := [reason for reason in summary.gpu.get("slowed_by", ()) if reason != "power limit"]:
        at = f", to {clock:.0f} of {most:.0f} MHz" if clock and most else ""
        yield Bottleneck(
            name="throttled GPU",
            lost=1 - clock / most if clock and most else 0.2,
            what=f"the GPU was slowed down: {', '.join(slowed)}{at}",
            change="check cooling and power of that machine, or use another one",
        )
    if retries := summary.memory.get("retries", 0):
        yield Bottleneck(
            name="out of memory, nearly",
            lost=0.1,
            what=f"{retries:.0f} allocations succeeded only after the allocator had freed its cache, which waits for"
            " the GPU",
            change=_lacking(
                summary,
                "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
                "recompute (ActivationCheckpoint)",
                "lower the batch size",
            ),
        )


def _outside_steps(summary: Summary) -> Iterator[Bottleneck]:
    if not summary.fit_s:
        return
    restart = summary.hints.get("num_workers") and not summary.hints.get("persistent_workers")
    for name, what, seconds, change in (
        (
            "much validation",
            "validation",
            summary.pauses.get("validation", 0.0),
            "validate less often (val_check_interval), or on fewer batches (limit_val_batches)",
        ),
        (
            "slow checkpoints",
            "checkpoints",
            summary.pauses.get("checkpoint", 0.0),
            "save less often, or in the background (FSDP2Strategy(async_save=True))",
        ),
        (
            "slow ends of epochs",
            "spent between the last step of an epoch and the first step of the next",
            summary.between_s,
            "set persistent_workers=True in the DataLoader: each epoch starts new workers"
            if restart
            else "check what runs there (on_train_epoch_end, iter(dataloader)), or make epochs longer",
        ),
    ):
        if (share := seconds / summary.fit_s) >= 0.2:
            yield Bottleneck(name=name, lost=share, what=f"{share:.0%} of the fit is {what}", change=change)
