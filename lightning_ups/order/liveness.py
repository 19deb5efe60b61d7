"""Finds optimizers that hold parameters which a conversion or sharding has replaced."""

from collections.abc import Iterable, Sequence

from torch import nn
from torch.optim import Optimizer

__all__ = ["check_live", "uncovered"]


def check_live(module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Raise if an optimizer holds parameters that the module no longer has, which would silently train nothing.

    Parameters kept outside the module, such as in a list, are allowed as long as every parameter of the module is in an
    optimizer: replaced parameters come in pairs, one stale and one missing.

    Raises:
        ValueError: If an optimizer holds stale parameters.
    """
    mine = set(module.parameters())
    dead = [p for p in _held(optimizers) if isinstance(p, nn.Parameter) and p not in mine]
    if dead and (missed := uncovered(module, optimizers)):
        raise ValueError(
            f"{len(dead)} of the optimizer's parameters are not in {type(module).__name__},"
            f" and {len(missed)} of the module's are in no optimizer, such as {missed[0]}."
            " The optimizer was created before conversion or sharding replaced the parameters:"
            " it would step the old ones, and nothing would train."
            " Create the optimizer in configure_optimizers, from self.parameters()."
        )


def uncovered(module: nn.Module, optimizers: Iterable[Optimizer]) -> list[str]:
    """Return the names of trainable parameters that no optimizer holds."""
    held = set(_held(optimizers))
    return [name for name, p in module.named_parameters() if p.requires_grad and p not in held]


def _held(optimizers: Iterable[Optimizer]) -> Iterable[nn.Parameter]:
    return (p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])
