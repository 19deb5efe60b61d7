"""What a training loop owes to CUDA graphs, whose outputs lie in memory that the next step writes to again."""

from typing import Any

import torch
from torch import Tensor, nn

from lightning_ups._compat import dynamo

__all__ = ["OwnGradients", "begin_step", "copied"]


def begin_step() -> None:
    """Say that a step begins, and that what graphs returned in the last one may be overwritten."""
    torch.compiler.cudagraph_mark_step_begin()


def copied(outputs: Any) -> Any:
    """Return ``outputs`` of a graph with copies of what is likely to be kept: scalars, and all of an evaluation."""
    evaluating = not torch.is_grad_enabled()
    return dynamo.tree_map(lambda tensor: tensor.clone() if evaluating or tensor.dim() == 0 else tensor, outputs)


class OwnGradients:
    """Memory for the gradients of ``module`` that no graph overwrites.

    The backward of a graph leaves its parameters' gradients in the graph's memory. There they would be lost when the
    next batch begins to run, before it can add to them, and before the module can be moved.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._own: dict[nn.Parameter, Tensor] = {}

    def take(self) -> None:
        """Move the gradients that are there into memory of their own; call it after each backward."""
        theirs, ours = [], []
        for parameter in self._module.parameters():
            grad = parameter.grad
            if grad is None or grad.layout is not torch.strided or grad is self._own.get(parameter):
                continue
            own = self._own.get(parameter)
            if own is None or (own.shape, own.stride(), own.dtype) != (grad.shape, grad.stride(), grad.dtype):
                own = self._own[parameter] = torch.empty_like(grad)
            theirs.append(grad)
            ours.append(own)
            parameter.grad = own
        if ours:
            torch._foreach_copy_(ours, theirs)  # one launch, where a loop would have one for each
