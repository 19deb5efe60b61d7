"""How much a batch holds, in tokens, samples, or whatever the user counts."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["Count", "counter"]

Count = Callable[[Any], "int | float"]

_IDS = (torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.int64)  # not bool: that is a mask
_TOKENS = ("input_ids", "tokens", "token_ids", "decoder_input_ids", "idx")


def counter(unit: str, count: str | Count | None, batch: Any) -> tuple[str, Count]:
    """Return the unit's name and what counts it in batches like ``batch``.

    Args:
        unit: ``"tokens"``, ``"samples"``, any other name if ``count`` is given, or ``"auto"``: tokens if there are any,
            and samples if not.
        count: A function of a batch, or the dotted name of a tensor in it, whose elements are counted, or, for
            ``"samples"``, its rows. None: the first tensor that it can be.
        batch: An example.

    Raises:
        ValueError: If the batch has nothing of the kind.
    """
    if callable(count):
        return ("units" if unit == "auto" else unit), count
    if count is not None:
        return ("tokens" if unit == "auto" else unit), _by_key(unit, count, batch)
    named = [*_tensors(batch)]
    tokens = next((key for key, tensor in named if key.rpartition(".")[2] in _TOKENS), None) or next(
        (key for key, tensor in named if tensor.dim() == 2 and tensor.dtype in _IDS), None
    )
    samples = next((key for key, tensor in named if tensor.dim() >= 1), None)
    if unit in ("auto", "tokens") and tokens is not None:
        return "tokens", lambda batch: _at(batch, tokens).numel()
    if unit in ("auto", "samples") and samples is not None:
        return "samples", lambda batch: _at(batch, samples).shape[0]
    raise ValueError(
        f"TokenThroughput(unit={unit!r}) cannot be counted in this batch."
        f" It is a {type(batch).__name__} with {_listed(named)}, and tokens are a tensor of integers [batch, position]."
        " Say what is counted: count='name.of.a.tensor', or count=a function of the batch."
    )


def _by_key(unit: str, key: str, batch: Any) -> Count:
    named = dict(_tensors(batch))
    if key not in named:
        raise ValueError(
            f"TokenThroughput(count={key!r}) names no tensor of the batch."
            f" It is a {type(batch).__name__} with {_listed([*named.items()])}."
            " Use one of these names, or a function of the batch."
        )
    if unit == "samples":
        return lambda batch: _at(batch, key).shape[0]
    return lambda batch: _at(batch, key).numel()


def _tensors(batch: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(batch, Tensor):
        yield name, batch
    elif isinstance(batch, Mapping):
        for key, inner in batch.items():
            yield from _tensors(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(batch, (list, tuple)):
        for index, inner in enumerate(batch):
            yield from _tensors(inner, f"{name}.{index}" if name else str(index))


def _at(batch: Any, key: str) -> Tensor:
    for part in key.split(".") if key else ():
        batch = batch[part] if isinstance(batch, Mapping) else batch[int(part)]
    return batch


def _listed(named: list[tuple[str, Tensor]]) -> str:
    return ", ".join(f"{key or 'itself'} {[*tensor.shape]}" for key, tensor in named[:8]) or "no tensor"
