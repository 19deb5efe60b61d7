"""What the hardware can do: memory and host-link bandwidth, matrix products, collectives by size, clocks and power."""

import shutil
import statistics
import subprocess
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from lightning_ups._compat.optional.nvml import gpu_states
from lightning_ups.insight.throughput import Clock, clock_for

_SIZES = (2**12, 2**16, 2**20, 2**24)  # bytes of each rank; more on GPUs
_ROUNDS = 5


def timed(clock: Clock, run: Callable[[], Any]) -> float:
    """Return the seconds of ``run``, which begins and ends with an idle device."""
    clock.wait()
    start = clock.mark()
    run()
    end = clock.mark()
    clock.wait()
    return clock.seconds(start, end)


def _seconds(device: torch.device, run: Callable[[], Any]) -> float:
    clock = clock_for(device)
    times = [timed(clock, run) for _ in range(_ROUNDS + 1)]
    return max(statistics.median(times[1:]), 1e-9)


def copy_rates(device: torch.device) -> dict[str, float]:
    """Return bytes per second: of the device's memory and, on a GPU, of copies from pinned and from other memory."""
    size = 2**28 if device.type == "cuda" else 2**25
    here, there = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    rates = {"memory": 2 * size / _seconds(device, lambda: there.copy_(here))}
    if device.type == "cuda":
        for name, is_pinned in (("pinned", True), ("pageable", False)):
            host = torch.empty(size // 4, dtype=torch.uint8, pin_memory=is_pinned)
            target = here[: size // 4]
            rates[name] = size / 4 / _seconds(device, lambda to=target, of=host: to.copy_(of, non_blocking=True))
    return rates


def matmul_rate(device: torch.device) -> float:
    """Return the FLOP/s of a large matrix product, in bfloat16 on a GPU and in float32 on a CPU."""
    side, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (768, torch.float32)
    x = torch.ones(side, side, dtype=dtype, device=device)
    return 2 * side**3 / _seconds(device, lambda: x @ x)


def collective_rates(device: torch.device) -> list[dict[str, Any]]:
    """Return seconds and bus bandwidth of each collective for several sizes, as nccl-tests defines it."""
    ranks, rows = dist.get_world_size(), []
    for size in (*_SIZES, *([2**28] if device.type == "cuda" else [])):
        whole = torch.ones(size // 4 * ranks, device=device)
        part, one = torch.ones(size // 4, device=device), torch.ones(size // 4, device=device)
        for name, run, factor in (
            ("all-reduce", lambda x=one: dist.all_reduce(x), 2 * (ranks - 1) / ranks),
            ("all-gather", lambda x=part, y=whole: dist.all_gather_into_tensor(y, x), ranks - 1),
            ("reduce-scatter", lambda x=part, y=whole: dist.reduce_scatter_tensor(x, y), ranks - 1),
        ):
            seconds = _seconds(device, run)
            rows.append({"what": name, "bytes": size, "seconds": seconds, "bus_bytes_per_s": factor * size / seconds})
    return rows


def topology(device: torch.device) -> dict[str, Any]:
    """Return how many visible GPUs there are, which pairs reach each other directly, and their NVLinks."""
    if device.type != "cuda":
        return {}
    count = torch.cuda.device_count()
    pairs = [(a, b) for a in range(count) for b in range(a + 1, count)]
    direct = sum(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
    states = gpu_states() or []
    return {"gpus": count, "pairs": len(pairs), "direct_pairs": direct, "nvlinks": [s.get("nvlinks") for s in states]}


def gpu_state(device: torch.device) -> dict[str, Any]:
    """Return clocks, power and throttling by ``nvidia-smi``, for machines without NVML's Python package."""
    if device.type != "cuda" or shutil.which("nvidia-smi") is None:
        return {}
    names = ("clocks.sm", "clocks.max.sm", "power.draw", "temperature.gpu", "clocks_throttle_reasons.active")
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    command = ["nvidia-smi", f"--id={uuid}", f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    values = [value.strip() for value in done.stdout.split(",")]
    if done.returncode or len(values) != len(names):
        return {}
    found: dict[str, Any] = {}
    for key, value in zip(("clock_mhz", "max_clock_mhz", "power_w", "temperature_c"), values[:4], strict=True):
        found[key] = float(value) if value.replace(".", "", 1).isdigit() else None
    # Bits of NVML: hardware slowdown, heat, heat of the hardware, power brake. A power limit is normal at full load.
    bits = {0x08: "hardware slowdown", 0x20: "too hot", 0x40: "too hot (hardware)", 0x80: "power brake"}
    active = int(values[4], 16) if values[4].startswith("0x") else 0
    return found | {"slowed_by": [reason for bit, reason in bits.items() if active & bit]}
