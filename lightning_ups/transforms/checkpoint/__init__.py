"""Checkpoints by torch's distributed checkpointing (DCP): saving, loading, and the folder they live in."""

from lightning_ups.transforms.checkpoint.folder import is_complete, newest, remove
from lightning_ups.transforms.checkpoint.loading import load, load_weights, resolve
from lightning_ups.transforms.checkpoint.saver import Phase, Saver, SaveTimes
from lightning_ups.transforms.checkpoint.saving import gathered, numbered, save_sharded
from lightning_ups.transforms.checkpoint.state import named_state

__all__ = [
    "Phase",
    "SaveTimes",
    "Saver",
    "gathered",
    "is_complete",
    "load",
    "load_weights",
    "named_state",
    "newest",
    "numbered",
    "remove",
    "resolve",
    "save_sharded",
]
