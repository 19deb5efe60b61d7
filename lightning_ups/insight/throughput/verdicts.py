"""Holding a run's figures against thresholds, and naming the one thing to change first."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lightning_ups.insight.throughput.meter import Summary

__all__ = ["Check", "Trouble", "checks", "first_change", "troubles"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One threshold: what was measured, what is wanted, whether it is reached; None: it was not measured.

    Args:
        name: What is measured.
        value: What was found; None: nothing.
        wanted: The threshold, for people.
        passed: Whether it is reached; None: not measured.
        note: Why not, or what the figure means.
    """

    name: str
    value: float | None
    wanted: str
    passed: bool | None
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trouble:
    """Something that costs time.

    Args:
        name: In one or two words.
        lost: The share of a step's time that would be won at most.
        what: What was seen, with its figures.
        change: What to do.
    """

    name: str
    lost: float
    what: str
    change: str


def checks(summary: Summary) -> list[Check]:
    """Return the thresholds of a healthy run, each with what ``summary`` says of it."""
    look, gpu, memory = summary.inspection, summary.gpu, summary.memory
    not_looked = "no step was looked at closely (inspect_at)" if gpu or memory else "measured on GPUs only"
    used = memory["reserved"] / memory["total"] if memory.get("total") else None
    return [
        _check("GPU utilisation", gpu.get("utilisation"), "> 80 %", lambda v: v > 0.8, _no_nvml(summary)),
        _check("GPU memory", used, "80-95 %", lambda v: 0.8 <= v <= 0.95, "measured on GPUs only", _memory_note(used)),
        _check("waiting for data", summary.split.get("data"), "< 5 %", lambda v: v < 0.05, "no step was split"),
        _check(
            "exposed communication",
            0.0 if summary.num_devices == 1 else (look.exposed_communication if look else None),
            "< 15 %",
            lambda v: v < 0.15,
            not_looked,
            "one device" if summary.num_devices == 1 else "",
        ),
        _check("MFU", summary.utilisation.get("mfu"), "> 50 %", lambda v: v > 0.5, summary.why_no_mfu),
        _check(
            "scaling efficiency",
            summary.scaling,
            "> 80 %",
            lambda v: v > 0.8,
            "one device" if summary.num_devices == 1 else "give single_device, the rate of one device alone",
        ),
    ]


def _check(
    name: str, value: float | None, wanted: str, good: Callable[[float], bool], why_not: str, note: str = ""
) -> Check:
    passed = None if value is None else good(value)
    return Check(name=name, value=value, wanted=wanted, passed=passed, note=why_not if value is None else note)


def _no_nvml(summary: Summary) -> str:
    return "NVML says nothing of it (pip install nvidia-ml-py)" if summary.memory else "measured on GPUs only"


def _memory_note(used: float | None) -> str:
    if used is None or 0.8 <= used <= 0.95:
        return ""
    return "room for a larger batch" if used < 0.8 else "close to running out"


def troubles(summary: Summary) -> list[Trouble]:
    """Return what costs time in the run, the costliest first."""
    found = [trouble for part in (_host, _data, _steps, _distributed, _machine, _between) for trouble in part(summary)]
    return sorted(found, key=lambda trouble: -trouble.lost)


def first_change(summary: Summary) -> Trouble | None:
    """Return the one thing to change first, or None if nothing that was measured is worth it."""
    if found := troubles(summary):
        return found[0]
    mfu, memory = summary.utilisation.get("mfu"), summary.memory
    used = memory["reserved"] / memory["total"] if memory.get("total") else None
    if used is not None and used < 0.8 and (mfu is None or mfu < 0.5):
        return Trouble(
            name="batch too small",
            lost=0.0,
            what=f"the GPU is busy, but {1 - used:.0%} of its memory is free{_mfu(mfu)}",
            change="raise the batch size until 80 to 95 % of the memory is used",
        )
    if mfu is not None and mfu < 0.5:
        return Trouble(
            name="slow kernels",
            lost=0.0,
            what=("" if used is None else "the GPU is busy and its memory used, but ") + f"MFU is {mfu:.0%}",
            change="compile (Compile), compute in bfloat16 or float8 (BF16Precision, Float8Precision),"
            " use fused attention",
        )
    return None


def _mfu(mfu: float | None) -> str:
    return "" if mfu is None else f", and MFU is {mfu:.0%}"


def _data(summary: Summary) -> Iterator[Trouble]:
    share = summary.split.get("data", 0.0)
    if share >= 0.05:
        workers = summary.hints.get("num_workers")
        more = "give the DataLoader num_workers (4 for each GPU is a start)" if workers == 0 else "raise num_workers"
        now = "" if workers is None else f", with num_workers={workers}"
        yield Trouble(
            name="slow loader",
            lost=share,
            what=f"{share:.0%} of each step is spent waiting for the next batch{now}",
            change=f"{more}, raise prefetch_factor, or prepare the data ahead of training",
        )
    copies = summary.split.get("transfer", 0.0)
    if copies >= 0.05:
        pinned = summary.hints.get("pin_memory")
        yield Trouble(
            name="slow transfer",
            lost=copies,
            what=f"{copies:.0%} of each step is spent copying the batch to the device",
            change="set pin_memory=True in the DataLoader" if pinned is False else "send smaller types, and less",
        )


def _steps(summary: Summary) -> Iterator[Trouble]:
    # What the loader and the copies make uneven is theirs.
    uneven = summary.uneven - summary.split.get("data", 0.0) - summary.split.get("transfer", 0.0)
    if summary.steps < 20 or uneven < 0.1 or not summary.step_s or not summary.step_p95_s:
        return
    yield Trouble(
        name="uneven steps",
        lost=uneven,
        what=f"steps of one size differ: {uneven:.0%} of the time is what some take longer than the median,"
        f" and one in twenty takes {summary.step_p95_s / summary.step_s:.1f} times that or more",
        change="look at what only some steps do: Python's garbage collection (AccelerationFlags holds it back),"
        " recompilation (Compile counts it), logging, callbacks; and at what else runs on the machine",
    )


def _host(summary: Summary) -> Iterator[Trouble]:
    look = summary.inspection
    if look is None or look.idle is None:
        return
    # What the loader and the copies leave idle is theirs.
    idle = look.idle - summary.split.get("data", 0.0) - summary.split.get("transfer", 0.0)
    if idle < 0.05:
        return
    if look.waits:
        where, count = look.waits[0]
        others = f" and {len(look.waits) - 1} more places" if len(look.waits) > 1 else ""
        yield Trouble(
            name="host sync",
            lost=idle,
            what=f"the GPU is idle for {idle:.0%} of a step, and the host waits for it at {where} ({count}x a step)"
            f"{others}",
            change="do not read values of the GPU in a step (.item(), print, if on a tensor, .cpu()):"
            " log tensors instead",
        )
        return
    memory = summary.memory
    used = memory["reserved"] / memory["total"] if memory.get("total") else 1.0
    if used < 0.8:
        yield Trouble(
            name="batch too small",
            lost=idle,
            what=f"the GPU is idle for {idle:.0%} of a step: the host cannot launch such small kernels fast enough,"
            f" while {1 - used:.0%} of the memory is free",
            change="raise the batch size; then compile (Compile(mode='auto') replays CUDA graphs where they pay)",
        )
    else:
        yield Trouble(
            name="slow host",
            lost=idle,
            what=f"the GPU is idle for {idle:.0%} of a step: the host launches kernels too slowly",
            change="compile (Compile), use a fused optimizer, log less often",
        )


def _distributed(summary: Summary) -> Iterator[Trouble]:
    look = summary.inspection
    exposed = (look.exposed_communication or 0.0) if look else 0.0
    if summary.num_devices > 1 and exposed >= 0.15:
        yield Trouble(
            name="slow exchange",
            lost=exposed,
            what=f"{exposed:.0%} of a step is communication that nothing hides",
            change="accumulate gradients (accumulate_grad_batches), shard less (sharding='gradients', replicate_size),"
            " and look at the links (python -m lightning_ups doctor; NCCL_DEBUG=INFO)",
        )
    if (slowest := summary.slowest_rank) is not None and slowest[1] >= 0.1:
        rank, more = slowest
        yield Trouble(
            name="slow rank",
            lost=summary.waited_for,
            what=f"rank {rank} needs {more:.0%} longer than the others for its own part of a step, and all wait for it",
            change="look at that machine: its clocks, its disk, its loader, what else runs there",
        )


def _machine(summary: Summary) -> Iterator[Trouble]:
    slowed = [reason for reason in summary.gpu.get("slowed_by", ()) if reason != "power limit"]
    clock, most = summary.gpu.get("clock_mhz"), summary.gpu.get("max_clock_mhz")
    if slowed:
        lost = 1 - clock / most if clock and most else 0.2
        at = f", to {clock:.0f} of {most:.0f} MHz" if clock and most else ""
        yield Trouble(
            name="throttled GPU",
            lost=lost,
            what=f"the GPU was slowed down: {', '.join(slowed)}{at}",
            change="look at cooling and power of that machine, or use another",
        )
    if retries := summary.memory.get("retries", 0):
        yield Trouble(
            name="out of memory, nearly",
            lost=0.1,
            what=f"{retries:.0f} allocations succeeded only after everything cached was given back,"
            " which waits for the GPU",
            change="set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, recompute (ActivationCheckpoint),"
            " or lower the batch size",
        )


def _between(summary: Summary) -> Iterator[Trouble]:
    for phase, change in (
        ("validation", "validate less often (val_check_interval), or on fewer batches (limit_val_batches)"),
        ("checkpoint", "save less often, or in the background (FSDP2Strategy(async_save=True))"),
    ):
        share = summary.pauses.get(phase, 0.0) / summary.fit_s if summary.fit_s else 0.0
        if share >= 0.2:
            yield Trouble(
                name=f"much {phase}" if phase == "validation" else "slow checkpoints",
                lost=share,
                what=f"{share:.0%} of the whole fit is {phase}",
                change=change,
            )
    between = summary.between_s / summary.fit_s if summary.fit_s else 0.0
    if between >= 0.2:
        workers = summary.hints.get("num_workers") and not summary.hints.get("persistent_workers")
        yield Trouble(
            name="slow ends of epochs",
            lost=between,
            what=f"{between:.0%} of the whole fit lies between the last step of an epoch and the first of the next",
            change="set persistent_workers=True in the DataLoader: each epoch starts its workers anew"
            if workers
            else "look at what runs there (on_train_epoch_end, iter(dataloader)), or make epochs longer",
        )
