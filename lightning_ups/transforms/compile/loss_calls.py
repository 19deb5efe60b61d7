"""Cross-entropies of many logits, compiled where a step calls the function and no module computes them.

A model that is compiled as a whole returns its logits, and the loss is computed outside. Uncompiled, the function reads
and writes all logits in float32 several times, and takes longer than the model if their layout does not suit it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_ups._compat.patches import applied
from lightning_ups._compat.thread_stack import ThreadStack
from lightning_ups._compat.torch.compile import dynamo
from lightning_ups._compat.torch.tensors.autograd import in_torch_func, saves_with_hooks

__all__ = ["CrossEntropy", "large_cross_entropies"]

LEAST_LOGITS = 2**22
NAME = "F.cross_entropy"
Compiling = Callable[[Mapping[str, nn.Module]], None]


class CrossEntropy(nn.CrossEntropyLoss):
    """``F.cross_entropy`` as a module, which can be compiled like any other.

    Args:
        function: The function.
    """

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.function(*args, **kwargs)


@contextmanager
def large_cross_entropies(compiling: Compiling | None) -> Iterator[None]:
    """Let calls of ``F.cross_entropy`` with many logits go to a module, while the context is open in this thread.

    Calls in compiled code, in a checkpoint, and in transforms of `torch.func` are left as they are.

    Args:
        compiling: Called with the module, by its name, before its first call, to compile it. None: all calls are left
            as they are. Compiled code then finds the same function as in a context with it.
    """
    with (
        applied("torch.nn.functional:cross_entropy", _dispatching),
        nullcontext() if compiling is None else _OPEN.holding(_Calls(compiling)),
    ):
        yield


class _Calls:
    def __init__(self, compiling: Compiling) -> None:
        self._compiling = compiling
        self._module: nn.Module | None = None
        self.is_inside = False

    def run(self, function: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        if self._module is None:
            self._module = CrossEntropy(function)
            self._compiling({NAME: self._module})
        self.is_inside = True  # a graph that runs as it was captured calls the function again
        try:
            return self._module(*args, **kwargs)
        finally:
            self.is_inside = False


_OPEN: ThreadStack[_Calls] = ThreadStack()


@cache  # compiled code is guarded by which function it found
def _dispatching(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(function)
    def cross_entropy(*args: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_compiling() or (calls := _OPEN.innermost) is None or calls.is_inside:
            return function(*args, **kwargs)
        return calls.run(function, args, kwargs) if _is_large(args, kwargs) else function(*args, **kwargs)

    return cross_entropy


def _is_large(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    logits = args[0] if args else kwargs.get("input")
    if type(logits) is not Tensor or logits.numel() < LEAST_LOGITS:
        return False
    # A checkpoint computes the loss a second time in backward, and must find there what it has saved.
    return not (saves_with_hooks() or in_torch_func() or dynamo.is_watched())
