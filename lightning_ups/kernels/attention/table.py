"""What was measured on a device: milliseconds of each backend for a number of shapes.

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
    """What was measured on a device.

    Args:
        device: Its name.
        capability: Its compute capability.
        versions: Of what the times hang on.
        date: The last day of measuring.
        rows: The device's milliseconds.
        host: The milliseconds that the host takes to queue a call, by "training" or "forward" and backend. Where there
            are none a row's time is the host's, if that was the longer one.
    """

    device: str
    capability: tuple[int, int]
    versions: dict[str, str]
    date: str
    rows: tuple[Row, ...]
    host: dict[str, dict[KernelName, float]] = {}  # noqa: RUF012  (a NamedTuple's; nobody writes to it)


@cache
def tables() -> tuple[Table, ...]:
    """Return the tables that come with the package."""
    folder = files("lightning_ups.kernels.attention").joinpath("measured")
    found = sorted((entry for entry in folder.iterdir() if entry.name.endswith(".json")), key=lambda entry: entry.name)
    return tuple(parse_table(json.loads(entry.read_text())) for entry in found)


def parse_table(content: dict[str, Any]) -> Table:
    """Return the table in a file's content."""
    rows = tuple(Row(**row) for row in content["rows"])
    major, minor = content["capability"]
    return Table(content["device"], (major, minor), content["versions"], content["date"], rows, content.get("host", {}))
