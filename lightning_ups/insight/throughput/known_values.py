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

from lightning_ups._compat.torch.tensors.autograd import outside_modes

__all__ = ["KnownValues"]

_MOST = 2**20  # elements
_MADE = ("arange", "full", "ones", "tensor", "zeros")  # tensors that functions make of plain numbers
_RANDOM = ("rand", "bernoulli", "geometric", "dropout", "multinomial")
_HOOKS = ("register", "backward")  # what others asked to be told


class KnownValues:
    """What tensors without data would hold, by the tensor."""

    def __init__(self) -> None:
        self._values = WeakTensorKeyDictionary()
        self._unread = WeakTensorKeyDictionary()

    def __getitem__(self, tensor: Tensor) -> Tensor | None:
        """Return what ``tensor`` would hold, on the host, or None where that is not known."""
        if (unread := self._unread.pop(tensor, None)) is not None and tensor._version == unread[1]:
            with outside_modes():
                self._note(tensor, unread[0].detach().to("cpu", copy=True))
        if (found := self._values.get(tensor)) is None:
            return None
        value, ahead = found  # both count writes, and their views' with them: else something was written to one alone
        return value if tensor._version - value._version == ahead else None

    def add(self, stand_in: Tensor, tensor: Tensor) -> None:
        """Note that ``stand_in`` would hold what ``tensor`` does, if that is small and of integers or truths.

        It is read when it is asked for: of many that are held, most are not.
        """
        if type(tensor) is Tensor and tensor.layout is torch.strided and tensor.device.type != "meta" and _fits(tensor):
            self._unread[stand_in] = tensor, stand_in._version

    def can_follow(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether what ``func`` will give for the other two is known, before it is called."""
        name, leaves = getattr(func, "__name__", ""), tree_leaves((args, kwargs))
        if any(part in name for part in (*_RANDOM, *_HOOKS)) or any(isinstance(x, torch.Generator) for x in leaves):
            return False
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return all(self[tensor] is not None for tensor in tensors) if tensors else name in _MADE

    def follow(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Note what ``result`` would hold, which ``func`` gave for the other two, and which can be followed."""
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if not (result is None or results) or not all(map(_fits, results)):
            return
        try:
            value = self._computed(func, args, kwargs)
        except Exception:  # noqa: BLE001  (what it holds is then not known)
            return
        values = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        if len(values) == len(results):
            for given, held in zip(results, values, strict=True):
                if held.shape == given.shape and held.dtype == given.dtype:
                    self._note(given, held)

    def forget(self, func: Callable[..., Any]) -> None:
        """Forget all, if ``func`` is one that writes where no tensor counts it."""
        name = getattr(func, "__name__", "")
        if name == "__set__" or (name.startswith("_foreach") and name.endswith("_")):
            self.clear()

    def clear(self) -> None:
        """Forget all."""
        self._values, self._unread = WeakTensorKeyDictionary(), WeakTensorKeyDictionary()

    def _note(self, tensor: Tensor, value: Tensor) -> None:
        self._values[tensor] = value, tensor._version - value._version

    def _computed(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        with outside_modes(), torch.device("cpu"), torch.no_grad():  # what it costs is not the model's
            return func(
                *tree_map(self._on_host, args), **{name: self._on_host_as(name, kwargs[name]) for name in kwargs}
            )

    def _on_host_as(self, name: str, value: Any) -> Any:
        return "cpu" if name == "device" else tree_map(self._on_host, value)

    def _on_host(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._values[value][0]
        return torch.device("cpu") if isinstance(value, torch.device) else value


def _fits(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel() <= _MOST
