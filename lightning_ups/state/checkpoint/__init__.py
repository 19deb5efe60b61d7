"""Checkpoints with torch's distributed checkpointing (DCP): saving, loading, and the folder format."""

from lightning_ups.state.checkpoint.claims import Signature, claim, neighbors, one_at_a_time
from lightning_ups.state.checkpoint.consolidation import (
    SavedWeights,
    check_file,
    consolidated,
    rest_of,
    write_safetensors,
)
from lightning_ups.state.checkpoint.folder import (
    ABANDONED_S,
    clean,
    damaged,
    has_checksums,
    is_complete,
    located,
    make,
    newer,
    newest,
    newest_within,
    remove,
    settle,
    unwritable,
)
from lightning_ups.state.checkpoint.loading import load, load_optimizers, load_weights, resolve
from lightning_ups.state.checkpoint.meta import damage_told
from lightning_ups.state.checkpoint.saver import Saver
from lightning_ups.state.checkpoint.saving import MODELS, described, gathered, numbered, save_sharded, save_whole
from lightning_ups.state.checkpoint.stages import with_all_stages
from lightning_ups.state.checkpoint.state import named_state

__all__ = [
    "ABANDONED_S",
    "MODELS",
    "SavedWeights",
    "Saver",
    "Signature",
    "check_file",
    "claim",
    "clean",
    "consolidated",
    "damage_told",
    "damaged",
    "described",
    "gathered",
    "has_checksums",
    "is_complete",
    "load",
    "load_optimizers",
    "load_weights",
    "located",
    "make",
    "named_state",
    "neighbors",
    "newer",
    "newest",
    "newest_within",
    "numbered",
    "one_at_a_time",
    "remove",
    "resolve",
    "rest_of",
    "save_sharded",
    "save_whole",
    "settle",
    "unwritable",
    "with_all_stages",
    "write_safetensors",
]
