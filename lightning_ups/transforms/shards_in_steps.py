"""Functions that code of a training step calls on the shards from ``parameters()``."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from lightning_ups._compat.patches import applied

_FACTORIES = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")


@contextmanager
def plain_from_shards() -> Iterator[None]:
    """Let ``shard.new_zeros(...)`` and similar functions return plain tensors while the context is open."""
    with ExitStack() as stack:
        for name in _FACTORIES:
            target = f"torch.distributed.tensor:DTensor.{name}"
            stack.enter_context(applied(target, lambda _, name=name: _factory(name), once=True))
        yield


def _factory(name: str) -> Any:
    def make(shard: DTensor, *args: Any, **kwargs: Any) -> Tensor:
        return getattr(shard.to_local(), name)(*args, **kwargs)

    return make


@contextmanager
def refusing_gradients_of_shards(step: str) -> Iterator[None]:
    """Make ``torch.autograd.grad`` raise for shards, whose gradients would be averages over all devices.

    Args:
        step: The name of the step that runs in the context.
    """

    def refusing(stock: Callable[..., Any]) -> Callable[..., Any]:
        def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            given = tree_leaves(inputs)  # a tensor, several, or since torch 2.13 a dict
            if any(isinstance(each, nn.Parameter) and isinstance(each, DTensor) for each in given):
                raise RuntimeError(
                    f"{step} calls torch.autograd.grad for gradients of parameters. SimpleFSDPStrategy averages these"
                    " over all ranks, while DDP returns those of one rank's batch. Use strategy='ddp'."
                )
            return stock(outputs, inputs, *args, **kwargs)

        return grad

    with applied("torch.autograd:grad", refusing):
        yield
