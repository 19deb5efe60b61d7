"""The figures of a run as a text table, printed at the end of fit."""

from collections.abc import Iterator, Sequence

from lightning_ups.insight.throughput.bottlenecks import checks, first_change, is_short, unmeasured
from lightning_ups.insight.throughput.meter import Summary

Row = tuple[str, str]

PHASE_NAMES = {
    "data": "waiting for data",
    "transfer": "host to device",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "other": "loop, logging, callbacks",
}


def phase_names(summary: Summary) -> dict[str, str]:
    """Return the names of the phases; on a CPU nothing is copied to a device."""
    return PHASE_NAMES | ({"transfer": "batch hooks"} if summary.on_cpu else {})


def text_table(summary: Summary) -> str:
    """Return the table: rates, the split of a step, thresholds, and what to change first."""
    return "\n".join(["", *_lines(summary), ""]) + "\n"


def _lines(summary: Summary) -> Iterator[str]:
    devices = f"{summary.num_devices} x {summary.device}"
    if summary.units_per_s is None:
        yield f"Throughput ({devices}): nothing was measured."
        yield f"  Training ended within its warm-up of {summary.warmup_steps} steps."
        return
    yield f"Throughput ({devices}), {summary.steps} steps after a warm-up of {summary.warmup_steps}"
    yield from _aligned([("  " + name, value) for name, value in rows(summary)])
    yield ""
    table = [("  threshold", "measured", "wanted", "")]
    for check in (measured := checks(summary)):
        verdict = "pass" if check.passed else "FAIL"
        table.append((f"  {check.name}", f"{check.value:.1%}", check.wanted, f"{verdict}  {check.note}".rstrip()))
    yield from _aligned(table if measured else [])
    if missing := unmeasured(summary):
        yield f"  not measured: {', '.join(missing)}"
    yield ""
    change = first_change(summary)
    if is_short(summary):
        yield f"  Change first: {summary.steps} steps are too few to say."
    elif change is None:
        yield "  Change first: nothing that was measured stands out."
    else:
        yield f"  Change first: {change.name}: {change.what}."
        yield f"  {change.change[0].upper()}{change.change[1:]}."
    options = "--config RUN.yaml, or --model FILE.CLASS --data FILE.CLASS"
    yield f"  To look closer: python -m lightning_ups diagnose {options}"


def rows(summary: Summary) -> list[Row]:
    """Return the names and values of all figures, as text."""
    return [*_rates(summary), *_split(summary), *_fit(summary), *_device(summary)]


def _rates(summary: Summary) -> Iterator[Row]:
    unit = summary.unit
    if summary.units_per_s is not None and summary.units_per_s_per_device is not None:
        yield (
            f"{unit}/s",
            f"{_number(summary.units_per_s)} in all, {_number(summary.units_per_s_per_device)} per device",
        )
    if summary.step_s is not None and summary.step_p95_s is not None:
        yield "step", f"{_seconds(summary.step_s)} median, {_seconds(summary.step_p95_s)} p95"
    utilisation = summary.utilisation
    if "mfu" in utilisation:
        text = f"MFU {utilisation['mfu']:.1%}, HFU {utilisation['hfu']:.1%}"
        if "mfu_mixed" in utilisation and summary.flops is not None:
            share = summary.flops.low_precision / summary.flops.model
            text += f"; with the {share:.0%} in fp8 at fp8's peak {utilisation['mfu_mixed']:.1%}"
        yield "utilisation", text
    elif summary.why_no_mfu:
        yield "utilisation", summary.why_no_mfu


def _split(summary: Summary) -> Iterator[Row]:
    if summary.split:
        parts = [f"{name} {summary.split.get(phase, 0.0):.1%}" for phase, name in phase_names(summary).items()]
        yield "of a step", ", ".join(parts)
    if (look := summary.inspection) is not None and look.idle is not None:
        exposed = f", exposed communication {look.exposed_communication:.1%} (of {look.communication:.1%})"
        hidden = exposed if summary.num_devices > 1 else ""
        yield "of the device", f"idle {look.idle:.1%}, exposed copies {look.exposed_copies:.1%}{hidden}"
    if look is not None and look.waits:
        yield "host waits at", ", ".join(f"{place} {count}x" for place, count in look.waits[:3])


def _fit(summary: Summary) -> Iterator[Row]:
    pauses = {**summary.pauses, "between epochs": summary.between_s}
    parts = [f"{name} {_seconds(seconds)}" for name, seconds in pauses.items() if seconds]
    if summary.start_s is not None:
        parts.insert(0, f"until the first step was done {_seconds(summary.start_s)}")
    if summary.fit_s is not None:
        yield "fit", ", ".join([f"{_seconds(summary.fit_s)} in all", *parts])


def _device(summary: Summary) -> Iterator[Row]:
    memory, gpu = summary.memory, summary.gpu
    if memory.get("total"):
        gib = {name: memory[name] / 2**30 for name in ("allocated", "reserved", "total")}
        yield (
            "peak memory",
            f"{gib['allocated']:.1f} GiB allocated, {gib['reserved']:.1f} reserved of {gib['total']:.1f},"
            f" {memory['retries']:.0f} retries",
        )
    if gpu:
        parts = [
            text.format(gpu[name])
            for name, text in (
                ("utilisation", "{:.0%} busy"),
                ("power_w", "{:.0f} W"),
                ("clock_mhz", "{:.0f} MHz"),
                ("temperature_c", "{:.0f} C"),
            )
            if name in gpu
        ]
        slowed = gpu.get("slowed_by")
        yield "GPU", ", ".join([*parts, f"slowed by {', '.join(slowed)}" if slowed else "not slowed"])


def _aligned(table: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _seconds(value: float) -> str:
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    return f"{value:.3g} s" if value < 120 else f"{value / 60:.3g} min"
