"""Values of small integer and bool tensors during a dry run, so that lengths and masks decide as in training.

They come from the batch, from buffers, and from what is computed from those alone. Other questions for a value get the
answer that log statements and sanity checks expect.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary
from typing_extensions import override

from lightning_ups._compat.torch.fake_tensors import has_no_data
from lightning_ups._compat.torch.tensors.autograd import outside_modes

_MAX_ELEMENTS = 2**20
_FACTORIES = ("arange", "full", "ones", "tensor", "zeros")  # make tensors from plain numbers
_RANDOM = ("rand", "bernoulli", "geometric", "dropout", "multinomial")
_CALLBACKS = ("register", "backward")


class KnownValues:
    """The values of fake tensors, as far as they are known."""

    def __init__(self) -> None:
        self._values = WeakTensorKeyDictionary()
        self._unread = WeakTensorKeyDictionary()

    def __getitem__(self, fake: Tensor) -> Tensor | None:
        """Return the value of ``fake`` on the host, or None if it is unknown."""
        if (unread := self._unread.pop(fake, None)) is not None and fake._version == unread[1]:
            with outside_modes():
                self._set(fake, unread[0].detach().to("cpu", copy=True))
        if (found := self._values.get(fake)) is None:
            return None
        value, ahead = found  # both versions count writes, also through views: unequal means that one was missed
        return value if fake._version - value._version == ahead else None

    def add(self, fake: Tensor, tensor: Tensor) -> None:
        """Let ``fake`` have the value of ``tensor``, if that is small and of integers or bools.

        The value is read when it is first needed: most are not.
        """
        if type(tensor) is Tensor and tensor.layout is torch.strided and not has_no_data(tensor) and _is_small(tensor):
            self._unread[fake] = tensor, fake._version

    def can_follow(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Return whether the result of this call is known, before it is made."""
        name, leaves = getattr(func, "__name__", ""), tree_leaves((args, kwargs))
        if any(part in name for part in (*_RANDOM, *_CALLBACKS)) or any(isinstance(x, torch.Generator) for x in leaves):
            return False
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return all(self[tensor] is not None for tensor in tensors) if tensors else name in _FACTORIES

    def follow(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Compute the value of ``result``, which a call that `can_follow` has returned."""
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if not (result is None or results) or not all(map(_is_small, results)):
            return
        try:
            with outside_modes(), torch.device("cpu"), torch.no_grad():  # not counted
                value = func(*tree_map(self._on_host, args), **{k: self._option(k, kwargs[k]) for k in kwargs})
        except Exception:  # noqa: BLE001  (the value stays unknown)
            return
        values = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        if len(values) == len(results):
            for fake, held in zip(results, values, strict=True):
                if held.shape == fake.shape and held.dtype == fake.dtype:
                    self._set(fake, held)

    def forget(self, func: Callable[..., Any]) -> None:
        """Forget all values, if ``func`` writes to tensors without counting it as a write."""
        name = getattr(func, "__name__", "")
        if name == "__set__" or (name.startswith("_foreach") and name.endswith("_")):
            self.clear()

    def clear(self) -> None:
        """Forget all values."""
        self._values, self._unread = WeakTensorKeyDictionary(), WeakTensorKeyDictionary()

    def _set(self, fake: Tensor, value: Tensor) -> None:
        self._values[fake] = value, fake._version - value._version

    def _option(self, name: str, value: Any) -> Any:
        return "cpu" if name == "device" else tree_map(self._on_host, value)

    def _on_host(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._values[value][0]
        return torch.device("cpu") if isinstance(value, torch.device) else value


def _is_small(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel() <= _MAX_ELEMENTS


class AnswerValues(TorchFunctionMode):
    """Answer questions for the value of a fake tensor, such as ``.item()``, with the known value or a plausible one."""

    def __init__(self, known: KnownValues) -> None:
        super().__init__()
        self._known = known

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if args and isinstance(args[0], Tensor):
            if name in _QUESTIONS and (value := self._known[args[0]]) is not None:
                with outside_modes():
                    return func(value, *args[1:], **kwargs)
            if name in _ANSWERS and has_no_data(args[0]):
                return _ANSWERS[name](args[0])
        if name in _GROUPED and len(args) > 1 and args[0].dim() == 2 and args[1].dim() == 3:
            return args[0] @ args[1][0]  # each row is multiplied by one of the matrices: as many operations
        known = self._known.can_follow(func, args, kwargs)
        drawn = {"generator": None} if isinstance(kwargs.get("generator"), torch.Generator) else {}
        result = func(*args, **kwargs | drawn)
        self._known.forget(func)
        if known:
            self._known.follow(func, args, kwargs, result)
        return result


_QUESTIONS = ("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "__format__")
_GROUPED = ("grouped_mm", "_grouped_mm")  # torch has no FLOP formula for them, and supports bfloat16 only
_ANSWERS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda fake: 1.0 if fake.is_floating_point() else fake.dtype is not torch.bool and 1,
    "__bool__": lambda _: False,
    "__float__": lambda _: 1.0,
    "__int__": lambda _: 1,
    "__index__": lambda _: 1,
    "__format__": lambda _: "1",
    "cpu": lambda fake: fake,
    "cuda": lambda fake: fake,
}
