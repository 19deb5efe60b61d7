"""Checkpoints by torch's distributed checkpointing (DCP): saving, loading, and the folder they live in."""

from lightning_ups.transforms.checkpoint.consolidation import (
    SavedWeights,
    check_file,
    consolidated,
    rest_of,
    write_safetensors,
)
from lightning_ups.transforms.checkpoint.description import MODELS, described
from lightning_ups.transforms.checkpoint.folder import (
    damaged,
    has_checksums,
    is_complete,
    newest,
    newest_within,
    remove,
    unwritable,
)
from lightning_ups.transforms.checkpoint.loading import load, load_weights, resolve
from lightning_ups.transforms.checkpoint.saver import Phase, Saver, SaveTimes
from lightning_ups.transforms.checkpoint.saving import gathered, numbered, save_sharded, save_whole
from lightning_ups.transforms.checkpoint.state import named_state

__all__ = [
    "MODELS",
    "Phase",
    "SaveTimes",
    "SavedWeights",
    "Saver",
    "check_file",
    "consolidated",
    "damaged",
    "described",
    "gathered",
    "has_checksums",
    "is_complete",
    "load",
    "load_weights",
    "named_state",
    "newest",
    "newest_within",
    "numbered",
    "remove",
    "resolve",
    "rest_of",
    "save_sharded",
    "save_whole",
    "unwritable",
    "write_safetensors",
]
