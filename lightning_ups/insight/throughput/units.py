"""The size of a batch in tokens, samples, or units that the user counts."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

Count = Callable[[Any], "int | float | Tensor"]

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.int64)  # bool is a mask
_TOKENS = ("input_ids", "tokens", "token_ids", "decoder_input_ids")
_INDICES = ("idx",)  # tokens or indices of samples


class _Found(NamedTuple):
    name: str  # dotted
    tensor: Tensor

    @property
    def shown(self) -> str:
        if self.name.isdigit():
            return f"element {self.name} of the batch"
        return f"{self.name!r} in the batch" if self.name else "the batch itself"


def counter(unit: str, count: str | Count | None, batch: Any) -> tuple[str, Count, str]:
    """Return the name of the unit, a function that counts it in batches like ``batch``, and what it counts, as text.

    Args:
        unit: ``"tokens"``, ``"samples"``, another name if ``count`` is given, or ``"auto"``: tokens if there are any,
            else samples, else batches.
        count: A function of a batch, or the dotted name of a tensor whose elements are counted, or its rows for
            ``"samples"``. None: a suitable tensor is chosen.
        batch: An example.

    Raises:
        ValueError: If the batch has no such tensor.
    """
    if callable(count):
        return ("units" if unit == "auto" else unit), count, "by a function"
    found = [*_tensors(batch)]
    if count is not None:
        return ("tokens" if unit == "auto" else unit), *_by_name(unit, count, batch, found)
    if unit in ("auto", "tokens") and (tokens := _token_ids(found)) is not None:
        return "tokens", _count_of(_token_ids, Tensor.numel), f"the elements of {tokens.shown}"
    if unit in ("auto", "samples") and (samples := _with_rows(found)) is not None:
        return "samples", _count_of(_with_rows, _rows), f"the rows of {samples.shown}"
    if unit == "auto":
        return "batches", lambda _: 1, f"since a {type(batch).__name__} with {_listed(found)} has no rows"
    raise ValueError(
        f"TokenThroughput(unit={unit!r}) finds no {unit} in a {type(batch).__name__} with {_listed(found)}."
        " Use count='name.of.a.tensor', or count=a function of the batch."
    )


def tensors_of(batch: Any) -> dict[str, Tensor]:
    """Return the tensors in the mappings, sequences and dataclasses of a batch, by dotted name."""
    return {each.name: each.tensor for each in _tensors(batch)}


def _token_ids(found: list[_Found]) -> _Found | None:
    matrices = [each.tensor for each in found if each.tensor.is_floating_point() and each.tensor.dim() > 1]
    named = next((each for each in found if _has_token_name(each, matrices)), None)
    if named is not None or matrices:
        return named  # next to floating-point inputs, integers are labels
    return next((each for each in found if each.tensor.dim() == 2 and each.tensor.dtype in _INTEGERS), None)


def _has_token_name(found: _Found, matrices: list[Tensor]) -> bool:
    name, tensor = found.name.rpartition(".")[2], found.tensor
    if tensor.dtype not in _INTEGERS or name not in (*_TOKENS, *_INDICES):
        return False
    if tensor.dim() != 1:
        return tensor.dim() > 1
    # Packed sequences have one dimension, and so has one integer per sample.
    return name in _TOKENS and all(len(matrix) != len(tensor) for matrix in matrices)


def _with_rows(found: list[_Found]) -> _Found | None:
    return next((each for each in found if each.tensor.dim() >= 1), None)


def _rows(tensor: Tensor) -> int:
    return tensor.size(0)  # nested tensors have no shape


def _count_of(find: Callable[[list[_Found]], _Found | None], size: Callable[[Tensor], int]) -> Count:
    def count(batch: Any) -> int:
        found = find([*_tensors(batch)])  # again in each batch: one of several loaders may be exhausted
        return 0 if found is None else size(found.tensor)

    return count


def _by_name(unit: str, name: str, batch: Any, found: list[_Found]) -> tuple[Count, str]:
    def find(found: list[_Found]) -> _Found | None:
        return next((each for each in found if each.name == name), None)

    wanted = find(found)
    if wanted is None:
        raise ValueError(
            f"TokenThroughput(count={name!r}) names no tensor of the batch, a {type(batch).__name__} with"
            f" {_listed(found)}. Use one of these names, or a function of the batch."
        )
    size, what = (_rows, "rows") if unit == "samples" else (Tensor.numel, "elements")
    return _count_of(find, size), f"the {what} of {wanted.shown}"


def _tensors(batch: Any, name: str = "") -> Iterator[_Found]:
    if isinstance(batch, Tensor):
        yield _Found(name, batch)
        return
    items: Any = ()
    if isinstance(batch, Mapping):
        items = batch.items()
    elif isinstance(batch, (list, tuple)):
        items = enumerate(batch)
    elif is_dataclass(batch) and not isinstance(batch, type):
        items = ((each.name, getattr(batch, each.name, None)) for each in fields(batch))
    for key, inner in items:
        yield from _tensors(inner, f"{name}.{key}" if name else str(key))


def _listed(found: list[_Found]) -> str:
    return ", ".join(f"{each.name or 'itself'} {[*each.tensor.shape]}" for each in found[:8]) or "no tensor"
