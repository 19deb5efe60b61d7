"""The counters and the snapshot of torch's allocator for GPUs, by torch's private names."""

from pathlib import Path
from typing import Any

import torch

__all__ = ["allocator_counters", "begin_history", "device_memory", "end_history", "write_snapshot"]


def allocator_counters(device: torch.device) -> dict[str, int]:
    """Return the counters of the allocator for ``device``, without waiting for the device; none if it has none."""
    return torch.cuda.memory_stats(device) if device.type == "cuda" and torch.cuda.is_initialized() else {}


def device_memory(device: torch.device) -> int | None:
    """Return the memory of ``device`` in bytes, or None if it is not a GPU."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def begin_history(device: torch.device) -> None:
    """Record where allocations come from, from now on; each then costs some microseconds."""
    if device.type == "cuda":
        torch.cuda.memory._record_memory_history(max_entries=100_000, device=device)


def end_history(device: torch.device) -> None:
    """Record no more."""
    if device.type == "cuda":
        options: dict[str, Any] = {"enabled": None, "device": device}
        torch.cuda.memory._record_memory_history(**options)


def write_snapshot(path: Path, device: torch.device) -> bool:
    """Write every block of the allocator's memory to ``path``, and return whether there was one to ask."""
    if device.type != "cuda":
        return False
    torch.cuda.memory._dump_snapshot(str(path))
    return True
