"""Converts a checkpoint to one file, or a few safetensors files, in one process and without the model."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lightning_ups._compat.optional.packages import require
from lightning_ups.state.checkpoint import meta
from lightning_ups.state.checkpoint.io.reading import FolderReader, SlicedReader, read_into
from lightning_ups.state.checkpoint.loading import EXTRA, PLACES, SHARDED, nested, put_back, rest_of_folder
from lightning_ups.state.checkpoint.saving import numbered
from lightning_ups.state.checkpoint.state import as_kept

_INDEX = "model.safetensors.index.json"
_KEPT = ("last_model_path", "best_model_path", "kth_best_model_path")  # in the state of a ModelCheckpoint


class SavedWeights(Mapping[str, Tensor]):
    """The weights of a checkpoint by name, each read on access.

    Args:
        path: A complete checkpoint: a folder, or a file of ``torch.save``.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        if path.is_file():
            saved, _ = meta.loaded(path, needless=meta.Everything(), mmap=True)
            state = meta.weights(path, saved)
            self._reader, self._prefix = SlicedReader({n: t for n, t in state.items() if isinstance(t, Tensor)}), ""
        else:
            self._reader, self._prefix = FolderReader(path), "state_dict."
        described = self._reader.read_metadata().state_dict_metadata
        self._entries = {
            name.removeprefix(self._prefix): entry
            for name, entry in described.items()
            if name.startswith(self._prefix) and isinstance(entry, TensorStorageMetadata)
        }

    def __getitem__(self, name: str) -> Tensor:
        entry = self._entries[name]
        with meta.damage_told(self._path):
            target = {self._prefix + name: torch.empty(entry.size, dtype=entry.properties.dtype)}
            read_into(target, self._reader)
            return target[self._prefix + name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def like(self, name: str) -> Tensor:
        """Return a tensor without memory that has the shape and dtype of a weight; nothing is read."""
        entry = self._entries[name]
        return torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")


def check_file(path: Path) -> None:
    """Raise ValueError if the file at ``path`` is not a checkpoint that a stock strategy can resume from."""
    saved, _ = meta.loaded(path, needless=meta.Everything(), mmap=True)
    meta.check_saved(path, saved, keys=("state_dict", "pytorch-lightning_version"))
    with meta.damage_told(path):
        for state in saved.get("callbacks", {}).values():
            # ModelCheckpoint deletes these paths when it has saved a better checkpoint.
            kept = [*state.get("best_k_models", ()), *map(state.get, _KEPT)] if isinstance(state, dict) else ()
            if outside := [each for each in kept if each and _may_lead_outside(each)]:
                raise ValueError(
                    f"{path} names {outside[0]!r:.80} as an earlier checkpoint, which a run that goes on would delete."
                    " Take a checkpoint from a source that you trust; this one was changed."
                )


def _may_lead_outside(path: str) -> bool:
    """Return whether Lightning's check that a checkpoint is in its folder would miss that ``path`` is elsewhere."""
    # It skips the check for protocols other than "file". "local" is an alias of it, and "::" may lead to it.
    return ".." in Path(path).parts or "::" in path or path.lower().startswith(("file:", "local:"))


def rest_of(path: Path, *, weights_only: bool = True) -> tuple[dict[str, Any], dict[str, str]]:
    """Return everything but weights and optimizer state in the checkpoint at ``path``, as far as it is safe to load.

    Returns:
        The rest, and the class of everything that was left out, by its place.
    """
    if path.is_file():
        saved, left = meta.loaded(path, needless=meta.Everything(), weights_only=weights_only, mmap=weights_only)
        return {
            key: value for key, value in saved.items() if key not in ("state_dict", "optimizer_states", PLACES)
        }, left
    return rest_of_folder(path, weights_only=weights_only, needless=meta.Everything())


def consolidated(path: Path, *, weights_only: bool = True) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the checkpoint folder at ``path`` as a single device would have saved it, including optimizer states.

    Returns:
        The checkpoint, and the class of everything that was left out, by its place.
    """
    reader = FolderReader(path)
    metadata = reader.read_metadata()
    values = {name: _room(entry) for name, entry in metadata.state_dict_metadata.items()}
    read_into(values, reader, weights_only=weights_only)
    with meta.damage_told(path):
        return _joined(path, values, metadata.planner_data, weights_only=weights_only)


def _joined(
    path: Path, values: dict[str, Any], places: Mapping[str, Any], *, weights_only: bool
) -> tuple[dict[str, Any], dict[str, str]]:
    tree = nested({places[name]: value for name, value in values.items() if not name.startswith(SHARDED + ".")})
    rest, left = rest_of(path, weights_only=weights_only)
    keys = sorted((key for key in tree if key.startswith("optimizer_")), key=lambda key: int(key.rpartition("_")[2]))
    states = [numbered(as_kept({"state": {}, **tree[key]})) for key in keys]
    extra = rest.pop(EXTRA, {})
    sharded = [name.removeprefix(SHARDED + ".") for name in values if name.startswith(SHARDED + ".")]
    checkpoint = {**put_back(rest, values), "state_dict": {**tree["state_dict"], **extra}}
    return checkpoint | ({"optimizer_states": states} if states else {}) | ({PLACES: sharded} if sharded else {}), left


def _room(entry: Any) -> Tensor | None:
    if isinstance(entry, TensorStorageMetadata):
        return torch.empty(entry.size, dtype=entry.properties.dtype)
    return None


def write_safetensors(
    directory: Path, weights: Mapping[str, Tensor], *, sizes: Mapping[str, int], max_shard_bytes: int
) -> list[Path]:
    """Write ``weights`` into ``directory`` in the format of transformers: one file, or several and an index.

    Weights are read from the mapping one file at a time.

    Args:
        directory: An existing directory.
        weights: The weights, by the names to write.
        sizes: The bytes of each weight.
        max_shard_bytes: The maximum size of a file; a larger weight gets its own file.

    Returns:
        The paths of the files.
    """
    safetensors = require("safetensors.torch", requirement="safetensors>=0.4.3", extra="hf", feature="export")
    shards = _shards(sizes, max_shard_bytes)
    if len(shards) == 1:
        names = ["model.safetensors"]
    else:
        names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for file, shard in zip(names, shards, strict=True):
        # Contiguous copies: safetensors refuses views, and weights that share memory.
        tensors = {name: weights[name].detach().clone(memory_format=torch.contiguous_format) for name in shard}
        safetensors.save_file(tensors, directory / file, metadata={"format": "pt"})
    if len(shards) > 1:
        places = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
        (directory / _INDEX).write_text(json.dumps(index, indent=2))
    return [directory / file for file in names]


def _shards(sizes: Mapping[str, int], limit: int) -> Sequence[list[str]]:
    shards: list[list[str]] = [[]]
    used = 0
    for name, size in sizes.items():
        if shards[-1] and used + size > limit:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards
