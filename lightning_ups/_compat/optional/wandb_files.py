"""Read the .wandb files that W&B writes, offline too."""

import importlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning_ups._compat.optional.packages import has

RUN_NAME = "run name"  # among the settings of a run that has one
_BLOCK = 32768  # a file is a log of LevelDB with a header of its own
_HEADER = b":W&B"
_WHOLE, _LAST = 1, 4  # kinds of fragments that end a record


def read_wandb(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the history of a run, a dict for each row, and its configuration, to which ``RUN_NAME`` is added.

    Raises:
        ValueError: If wandb is not installed or the file is not one that it wrote.
    """
    if not has("wandb"):
        raise ValueError(f"{path} can be read only with wandb. Run: pip install wandb. Or export the history as CSV.")
    messages: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    decoding: Any = importlib.import_module("google.protobuf.message")
    history, config = [], {}
    try:
        for record in map(messages.Record.FromString, _records(path)):
            kind = record.WhichOneof("record_type")
            if kind == "history":
                history.append(_items(record.history.item))
            elif kind in ("run", "config"):
                config |= _items((record.run.config if kind == "run" else record.config).update)
                config |= {RUN_NAME: record.run.display_name} if record.run.display_name else {}
    except decoding.DecodeError as error:
        raise ValueError(f"{path} is damaged: {error}. Export the history as CSV instead.") from error
    return history, {name: value for name, value in config.items() if name != "_wandb"}


def _items(items: Any) -> dict[str, Any]:
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


def _records(path: Path) -> Iterator[bytes]:
    data = path.read_bytes()
    if not data.startswith(_HEADER):
        raise ValueError(f"{path} is not a file of W&B. Give run-ID.wandb, or a CSV export of the history.")
    at, record = 7, b""
    while at + 7 <= len(data):
        if _BLOCK - at % _BLOCK < 7:  # the rest of a block is too short for a fragment
            at += _BLOCK - at % _BLOCK
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)  # after a checksum
        at += 7 + size
        if kind == 0 or at > len(data):  # the run still writes, or was killed
            return
        record += data[at - size : at]
        if kind in (_WHOLE, _LAST):
            yield record
            record = b""
