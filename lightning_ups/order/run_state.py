"""The state of a run, from its first change until all changes are undone."""

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_ups.order.applier import Step

__all__ = ["RunState"]


@dataclass
class RunState:
    """The state of one run, held by its `Context`.

    Args:
        undo: Undoes all changes, last first.
        to_wrap: Steps that wrap optimizers; empty once these are wrapped.
        watches_gradients: Whether the run checks for parameters without a gradient.
    """

    undo: ExitStack = field(default_factory=ExitStack)
    to_wrap: "list[Step]" = field(default_factory=list)
    watches_gradients: bool = False
