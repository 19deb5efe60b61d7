"""Explains errors of optimizers that cannot step shards."""

from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_tb

from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

__all__ = ["explaining_shards"]

# Texts of DTensor for operations without a sharding rule, in torch 2.11 to 2.13.
_ABOUT_SHARDS = ("DTensor", "placement", "sharding strategy", "Sharding propagation", "sharded dimension")


@contextmanager
def explaining_shards(optimizer: Optimizer) -> Iterator[None]:
    """Explain errors of ``optimizer`` in this context that are caused by sharded parameters.

    Raises:
        RuntimeError: If an operation of the optimizer does not support shards.
    """
    try:
        yield
    except (RuntimeError, AssertionError) as error:  # the first includes NotImplementedError
        if not _about_shards(error) or not _of_optimizer(error):
            raise
        if _has_whole_gradients(optimizer):
            raise RuntimeError(
                f"{type(optimizer).__name__} cannot step parameters whose gradients were assigned. Each rank has a part"
                " of a parameter, but torch.autograd.grad returns whole gradients, of this rank's batch only."
                " Call self.manual_backward(loss), which reduces gradients over ranks and shards them."
            ) from error
        name, said = type(optimizer).__name__, [*str(error).splitlines(), "DTensor has no way to do it"][0]
        raise RuntimeError(
            f"{name} cannot step sharded parameters: {said.rstrip('.')}."
            " It needs whole parameters, or in-place operations that only whole tensors support."
            " Use an elementwise optimizer (SGD, Adam, AdamW, NAdam, Adamax, Adagrad), or train"
            f" with strategy='ddp', where {name} sees whole parameters."
        ) from error


def _has_whole_gradients(optimizer: Optimizer) -> bool:
    parameters = (p for group in optimizer.param_groups for p in group["params"] if isinstance(p, DTensor))
    return any(p.grad is not None and not isinstance(p.grad, DTensor) for p in parameters)


def _about_shards(error: BaseException) -> bool:
    if isinstance(error, AssertionError):  # torch 2.11 gives no text if an in-place result would be a DTensor
        *_, (last, _) = walk_tb(error.__traceback__)
        return last.f_globals.get("__name__", "").startswith("torch.distributed.tensor")
    return any(word in str(error) for word in _ABOUT_SHARDS)


def _of_optimizer(error: BaseException) -> bool:
    """Return whether the error was raised by the optimizer itself, not in a closure that it called."""
    inside = False
    for frame, _ in walk_tb(error.__traceback__):
        if "closure" in frame.f_code.co_name:
            inside = False
        elif frame.f_code.co_name == "step" and isinstance(frame.f_locals.get("self"), Optimizer):
            inside = True
    return inside
