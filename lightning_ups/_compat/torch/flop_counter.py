"""A FLOP counter that counts recomputation separately."""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from typing_extensions import override

from lightning_ups._compat.torch.tensors.autograd import in_backward

__all__ = ["RecomputeCounter", "run_backward"]


def run_backward(loss: Tensor) -> None:
    """Call ``loss.backward()`` with active function modes, which torch disables in ``Tensor.backward``."""
    engine: Any = torch.autograd.Variable._execution_engine
    keep_graph = create_graph = False
    options = {"allow_unreachable": True, "accumulate_grad": True}
    engine.run_backward((loss,), (torch.ones_like(loss),), keep_graph, create_graph, (), **options)


class RecomputeCounter(FlopCounterMode):
    """Counts like torch's counter, and in ``recomputed`` the part that activation checkpointing computes again.

    Args:
        forwards: Operators that only a forward pass calls.
        **options: Options of torch's counter.
    """

    def __init__(self, *, forwards: Collection[Any] = (), **options: Any) -> None:
        super().__init__(**options)
        self.recomputed = 0
        self._forwards = frozenset(forwards)

    @override
    def _count_flops(self, func_packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
        # Backward formulas run without grad mode. Recomputation runs with it, except inside custom autograd functions.
        again = in_backward() and (torch.is_grad_enabled() or func_packet in self._forwards)
        before = self.flop_counts["Global"].get(func_packet, 0) if again else 0
        result = super()._count_flops(func_packet, out, args, kwargs)
        if again:
            self.recomputed += self.flop_counts["Global"].get(func_packet, 0) - before
        return result
