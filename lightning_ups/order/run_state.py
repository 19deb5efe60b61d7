"""What a run holds from its first change until all changes are undone."""

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_ups.order.applier import Step

__all__ = ["RunState"]


@dataclass
class RunState:
    """The state of one run, which its `Context` holds.

    Args:
        undo: Undoes all changes, the last first.
        to_wrap: Steps that wrap optimizers; empty once these are wrapped.
        watches_gradients: Whether parameters without a gradient are looked for.
    """

    undo: ExitStack = field(default_factory=ExitStack)
    to_wrap: "list[Step]" = field(default_factory=list)
    watches_gradients: bool = False
