"""The operator behind ``F.cross_entropy``, by torch's private names."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch._dynamo.trace_rules import get_torch_obj_rule_map
from torch.jit._builtins import _get_builtin_table

from lightning_ups._compat.patches import applied

__all__ = ["replaced_cross_entropy"]

_OPERATOR = "aten::cross_entropy_loss"


@contextmanager
def replaced_cross_entropy(make: Callable[[Callable[..., Tensor]], Callable[..., Tensor]]) -> Iterator[None]:
    """Let ``F.cross_entropy`` call ``make(operator)`` while the context is open, in place of the operator.

    TorchScript takes the replacement for the operator.
    """
    get_torch_obj_rule_map()  # Dynamo finds the operators that it knows by their names, once

    def made(operator: Any) -> Any:
        replacement = make(operator)
        _get_builtin_table()[id(replacement)] = _OPERATOR
        return replacement

    with applied("torch._C._nn:cross_entropy_loss", made):
        yield
