"""Batches whose samples have latents or do not, and the structure of a batch."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from lightning_ups.data.latents.store import Latents


class Missing:
    """The samples of a batch that have no latents yet: an object that Lightning neither moves nor casts.

    Args:
        split: The name of the loader.
        samples: Their numbers in the data.
        places: Their places in the batch.
        size: The size of the batch.
        batch: What the loader makes of them.
    """

    def __init__(self, split: str, samples: Sequence[int], places: Sequence[int], size: int, batch: Any) -> None:
        self.split, self.samples, self.places, self.size, self.batch = split, samples, places, size, batch


class LatentBatch(NamedTuple):
    """A batch of a loader.

    Args:
        structure: Of what the module receives, as `flatten` returns it. None: before the first row.
        found: The tensors of the samples that have latents.
        missing: The other samples, if there are any.
    """

    structure: "Structure | None"
    found: tuple[Tensor, ...]
    missing: Missing | None


class Structure:
    """A structure of tensors, in an object that is no collection."""

    def __init__(self, content: Any) -> None:
        self.content = content


class WithLatents(Dataset[LatentBatch]):
    """A dataset that reads latents in place of samples where they are written."""

    def __init__(self, split: str, dataset: Any, *, collate: Callable[[Any], Any], latents: Latents) -> None:
        self._split, self.dataset, self._collate, self._latents = split, dataset, collate, latents

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> LatentBatch:
        return self.__getitems__([index])

    def __getitems__(self, indices: Sequence[int]) -> LatentBatch:
        """Return a batch. A DataLoader calls this in place of ``__getitem__``."""
        samples = [int(index) for index in indices]
        there, found = self._latents.read(samples)
        structure = Structure(self._latents.layout["structure"]) if found and self._latents.layout else None
        if there.all():
            return LatentBatch(structure, found, None)
        places = np.flatnonzero(~there).tolist()
        wanted = [samples[place] for place in places]
        several = getattr(self.dataset, "__getitems__", None)
        raw = [self.dataset[sample] for sample in wanted] if several is None else several(wanted)
        return LatentBatch(structure, found, Missing(self._split, wanted, places, len(samples), self._collate(raw)))


def flatten(tree: Any) -> tuple[Any, list[Tensor]]:
    """Return the structure of ``tree`` for JSON, with the place of each tensor, and the tensors.

    Raises:
        TypeError: If ``tree`` has other things than tensors in tuples, lists and mappings with names.
    """
    tensors: list[Tensor] = []
    return _flatten(tree, tensors), tensors


def _flatten(tree: Any, tensors: list[Tensor]) -> Any:
    if isinstance(tree, Tensor):
        tensors.append(tree)
        return len(tensors) - 1
    if isinstance(tree, Mapping) and all(isinstance(name, str) for name in tree):
        return {name: _flatten(value, tensors) for name, value in tree.items()}
    if type(tree) in (tuple, list):
        return [type(tree).__name__, *(_flatten(value, tensors) for value in tree)]
    raise TypeError(
        f"PrecomputedLatents cannot store a {type(tree).__name__} of a batch: only tensors, in tuples, lists and dicts."
        " Leave it out in the dataset or in collate_fn."
    )


def unflatten(structure: Any, tensors: Sequence[Tensor]) -> Any:
    """Return the tree that `flatten` took apart."""
    if isinstance(structure, int):
        return tensors[structure]
    if isinstance(structure, Mapping):
        return {name: unflatten(value, tensors) for name, value in structure.items()}
    kind, *values = structure
    found = [unflatten(value, tensors) for value in values]
    return tuple(found) if kind == "tuple" else found
