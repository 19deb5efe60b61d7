"""Cross-entropies of many logits, compiled where a step calls the function and no module computes them.

A model that is compiled as a whole returns its logits, and the loss is computed outside. Uncompiled, the function reads
and writes all logits in float32 several times, and takes longer than the model if their layout does not suit it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit import is_tracing
from torch.nn.functional import cross_entropy
from typing_extensions import override

from lightning_ups._compat.contexts import ThreadStack
from lightning_ups._compat.torch.compile import dynamo
from lightning_ups._compat.torch.tensors.autograd import in_forward_ad, in_torch_func, saves_with_hooks
from lightning_ups._compat.torch.tensors.ops import replaced_cross_entropy

LEAST_LOGITS = 2**22
NAME = "F.cross_entropy"
_REDUCTIONS = ("none", "mean", "sum")
Compiling = Callable[[Mapping[str, nn.Module]], None]


class CrossEntropy(nn.CrossEntropyLoss):
    """``F.cross_entropy`` as a module, which can be compiled like any other, with the arguments of what that calls."""

    @override
    def forward(
        self,
        input: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        reduction: int = 1,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
    ) -> Tensor:
        return cross_entropy(
            input,
            target,
            weight,
            reduction=_REDUCTIONS[reduction],
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
        )


@contextmanager
def large_cross_entropies(compiling: Compiling | None) -> Iterator[None]:
    """Let calls of ``F.cross_entropy`` with many logits go to a module, while the context is open in this thread.

    Calls in compiled code, in a checkpoint, in a trace, and in transforms of `torch.func` are left as they are. The
    function itself is not replaced, so that it can still be pickled.

    Args:
        compiling: Called with the module, by its name, before its first call, to compile it. None: all calls are left
            as they are. Compiled code then finds the same function as in a context with it.
    """
    with (
        replaced_cross_entropy(_dispatching),
        nullcontext() if compiling is None else _OPEN.holding(_Calls(compiling)),
    ):
        yield


class _Calls:
    def __init__(self, compiling: Compiling) -> None:
        self._compiling = compiling
        self._module: nn.Module | None = None
        self.is_inside = False

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        if self._module is None:
            self._module = CrossEntropy()
            self._compiling({NAME: self._module})
        self.is_inside = True  # a graph that runs as it was captured calls the function again
        try:
            return self._module(*args, **kwargs)
        finally:
            self.is_inside = False


_OPEN: ThreadStack[_Calls] = ThreadStack()


@cache  # compiled code is guarded by which function it found
def _dispatching(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def cross_entropy_loss(*args: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_compiling() or (calls := _OPEN.innermost) is None or calls.is_inside:
            return function(*args, **kwargs)
        return calls.run(args, kwargs) if _is_large(*args, **kwargs) else function(*args, **kwargs)

    return cross_entropy_loss


def _is_large(input: Any, *_: Any, **__: Any) -> bool:
    if type(input) is not Tensor or input.numel() < LEAST_LOGITS:
        return False
    # A checkpoint computes the loss a second time in backward, and must find there what it has saved.
    return not (saves_with_hooks() or in_torch_func() or in_forward_ad() or dynamo.is_watched() or is_tracing())
