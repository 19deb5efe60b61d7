"""Measured times of each backend for a number of shapes, per device.

`benchmarks/attention.py` measures a device and writes ``measured/DEVICE.json``.
"""

import json
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from lightning_ups.kernels.attention.support import KernelName

__all__ = ["Row", "Table", "parse_table", "tables"]


class Row(NamedTuple):
    """Milliseconds of each backend for one shape."""

    head_dim: int
    heads: int
    kv_heads: int
    seq: int
    batch: int
    causal: bool
    forward: dict[KernelName, float]
    training: dict[KernelName, float]


class Table(NamedTuple):
    """The measurements of a device.

    Args:
        device: The name of the device.
        capability: Its compute capability.
        versions: The versions that the times depend on.
        date: The last day of the measurements.
        rows: The device's milliseconds.
        host: The host's milliseconds per call, by "training" or "forward" and backend. If missing, a row's time is the
            maximum of host and device.
    """

    device: str
    capability: tuple[int, int]
    versions: dict[str, str]
    date: str
    rows: tuple[Row, ...]
    host: dict[str, dict[KernelName, float]] = {}  # noqa: RUF012  (a NamedTuple's; nobody writes to it)


@cache
def tables() -> tuple[Table, ...]:
    """Return the tables in the package."""
    folder = files("lightning_ups.kernels.attention").joinpath("measured")
    found = sorted((entry for entry in folder.iterdir() if entry.name.endswith(".json")), key=lambda entry: entry.name)
    return tuple(parse_table(json.loads(entry.read_text())) for entry in found)


def parse_table(content: dict[str, Any]) -> Table:
    """Return the table in the content of a file."""
    rows = tuple(Row(**row) for row in content["rows"])
    major, minor = content["capability"]
    return Table(content["device"], (major, minor), content["versions"], content["date"], rows, content.get("host", {}))
