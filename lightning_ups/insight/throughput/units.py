"""How much a batch holds, in tokens, samples, or whatever the user counts."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Count", "counter", "tensors_of"]

Count = Callable[[Any], "int | float | Tensor"]

_IDS = (torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.int64)  # not bool: that is a mask
_TOKENS = ("input_ids", "tokens", "token_ids", "decoder_input_ids")
_INDICES = ("idx",)  # or the numbers of samples


@dataclass(frozen=True, slots=True)
class _Found:
    """A tensor of a batch: what it is called, and by which keys, indices and fields it is reached."""

    name: str
    path: tuple[Any, ...]
    tensor: Tensor

    @property
    def shown(self) -> str:
        return f"{self.name!r} in the batch" if self.name else "the batch itself"


def counter(unit: str, count: str | Count | None, batch: Any) -> tuple[str, Count, str]:
    """Return the unit's name, what counts it in batches like ``batch``, and where it looks, in words.

    Args:
        unit: ``"tokens"``, ``"samples"``, any other name if ``count`` is given, or ``"auto"``: tokens if there are any,
            samples if not, and batches where there is no tensor to count by.
        count: A function of a batch, or the dotted name of a tensor in it, whose elements are counted, or, for
            ``"samples"``, its rows. None: the first tensor that it can be.
        batch: An example.

    Raises:
        ValueError: If the batch has nothing of the kind.
    """
    if callable(count):
        return ("units" if unit == "auto" else unit), count, "by a function"
    if count is not None:
        return ("tokens" if unit == "auto" else unit), *_by_name(unit, count, batch)
    found = [*_tensors(batch)]
    if unit in ("auto", "tokens") and (tokens := _token_ids(found)) is not None:
        return "tokens", _by_path(tokens.path, _elements, _token_ids), f"the elements of {tokens.shown}"
    if unit in ("auto", "samples") and (samples := _rowed(found)) is not None:
        return "samples", _by_path(samples.path, _rows, _rowed), f"the rows of {samples.shown}"
    if unit == "auto":
        return "batches", lambda _: 1, f"since a {type(batch).__name__} with {_listed(found)} has no rows"
    raise ValueError(
        f"TokenThroughput(unit={unit!r}) cannot be counted in this batch."
        f" It is a {type(batch).__name__} with {_listed(found)}, and tokens are a tensor of integers [batch, position]."
        " Say what is counted: count='name.of.a.tensor', or count=a function of the batch."
    )


def tensors_of(batch: Any) -> dict[str, Tensor]:
    """Return the tensors of a batch, within mappings, sequences and dataclasses, by their dotted names."""
    return {each.name: each.tensor for each in _tensors(batch)}


def _token_ids(found: list[_Found]) -> _Found | None:
    matrices = [each.tensor for each in found if each.tensor.is_floating_point() and each.tensor.dim() > 1]
    named = next((each for each in found if _is_named_tokens(each, matrices)), None)
    if named is not None or matrices:
        return named  # beside inputs of another kind, integers are labels
    return next((each for each in found if each.tensor.dim() == 2 and each.tensor.dtype in _IDS), None)


def _is_named_tokens(found: _Found, matrices: list[Tensor]) -> bool:
    name, tensor = found.name.rpartition(".")[2], found.tensor
    if tensor.dtype not in _IDS or name not in (*_TOKENS, *_INDICES):
        return False
    if tensor.dim() != 1:
        return tensor.dim() > 1
    packed = all(len(matrix) != len(tensor) for matrix in matrices)  # else it is one number of each sample
    return packed and name in _TOKENS


def _rowed(found: list[_Found]) -> _Found | None:
    return next((each for each in found if each.tensor.dim() >= 1), None)


def _elements(tensor: Tensor) -> int:
    return tensor.numel()


def _rows(tensor: Tensor) -> int:
    return tensor.size(0)  # a nested one has no shape


def _by_path(
    path: tuple[Any, ...], size: Callable[[Tensor], int], find: Callable[[list[_Found]], _Found | None]
) -> Count:
    def count(batch: Any) -> int:
        tensor = _at(batch, path)
        if not isinstance(tensor, Tensor):  # a loader of several has come to its end, or batches differ
            other = find([*_tensors(batch)])
            return 0 if other is None else size(other.tensor)
        return size(tensor)

    return count


def _by_name(unit: str, name: str, batch: Any) -> tuple[Count, str]:
    found = [*_tensors(batch)]
    wanted = next((each for each in found if each.name == name), None)
    if wanted is None:
        raise ValueError(
            f"TokenThroughput(count={name!r}) names no tensor of the batch."
            f" It is a {type(batch).__name__} with {_listed(found)}."
            " Use one of these names, or a function of the batch."
        )
    size, what = (_rows, "rows") if unit == "samples" else (_elements, "elements")
    return _by_path(wanted.path, size, lambda _: None), f"the {what} of {wanted.shown}"


def _tensors(batch: Any, name: str = "", path: tuple[Any, ...] = ()) -> Iterator[_Found]:
    if isinstance(batch, Tensor):
        yield _Found(name, path, batch)
        return
    for key, inner in _inside(batch):
        yield from _tensors(inner, f"{name}.{key}" if name else str(key), (*path, key))


def _inside(batch: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(batch, Mapping):
        yield from batch.items()
    elif isinstance(batch, (list, tuple)):
        yield from enumerate(batch)
    elif is_dataclass(batch) and not isinstance(batch, type):
        yield from ((each.name, getattr(batch, each.name, None)) for each in fields(batch))


def _at(batch: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        if isinstance(batch, Mapping):
            batch = batch.get(key)
        elif isinstance(batch, (list, tuple)):
            batch = batch[key] if isinstance(key, int) and key < len(batch) else None
        else:
            batch = getattr(batch, key, None) if isinstance(key, str) else None
    return batch


def _listed(found: list[_Found]) -> str:
    return ", ".join(f"{each.name or 'itself'} {[*each.tensor.shape]}" for each in found[:8]) or "no tensor"
