"""Values of small tensors of integers and truths that the step on tensors without data still knows.

Lengths, masks and positions decide what a step does: how far a batch is cut, whether attention is causal. They come
from the batch, from buffers, and from what is computed of them alone.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["KnownValues"]

_MOST = 2**20  # elements
_MADE = ("arange", "full", "ones", "tensor", "zeros")  # tensors that functions make of plain numbers


class KnownValues:
    """What tensors without data would hold, by the tensor."""

    def __init__(self) -> None:
        self._values = WeakTensorKeyDictionary()

    def __getitem__(self, tensor: Tensor) -> Tensor | None:
        """Return what ``tensor`` would hold, on the host, or None where that is not known."""
        return self._values.get(tensor)

    def add(self, stand_in: Tensor, tensor: Tensor) -> None:
        """Note that ``stand_in`` would hold what ``tensor`` does, if that is small and of integers or truths."""
        if type(tensor) is Tensor and tensor.layout is torch.strided and tensor.device.type != "meta" and _fits(tensor):
            self._values[stand_in] = tensor.detach().to("cpu", copy=True)

    def follow(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Note what ``result`` would hold, which ``func`` gave for the other two."""
        name = getattr(func, "__name__", "")
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        known = all(tensor in self._values for tensor in tensors) if tensors else name in _MADE
        written = name == "__setitem__" or (bool(args) and result is args[0])
        if known and (written or (isinstance(result, Tensor) and _fits(result))) and "rand" not in name:
            try:
                value = self._computed(func, args, kwargs)
            except Exception:  # noqa: BLE001  (what it holds is then not known)
                value = None
            if name == "__setitem__":
                return
            if isinstance(value, Tensor) and value.shape == result.shape and value.dtype == result.dtype:
                self._values[result] = value
                return
        if written and isinstance(args[0], Tensor) and args[0] in self._values:
            self._values = WeakTensorKeyDictionary()  # others may be views of it

    def _computed(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        with torch.device("cpu"), torch.no_grad():
            return func(
                *tree_map(self._on_host, args), **{name: self._on_host_as(name, kwargs[name]) for name in kwargs}
            )

    def _on_host_as(self, name: str, value: Any) -> Any:
        return "cpu" if name == "device" else tree_map(self._on_host, value)

    def _on_host(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._values[value]
        return torch.device("cpu") if isinstance(value, torch.device) else value


def _fits(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel() <= _MOST
