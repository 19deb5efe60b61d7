"""Runs a step in place of the forward of the sharded model."""

from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from lightning_ups._compat.torch.fsdp.state import begin_forward, end_forward, expect_backward, settle
from lightning_ups.transforms.fsdp.shown_gradients import ShownGradients

__all__ = ["ModelForward"]


class ModelForward:
    """Gathers the parameters of the model's own group from the start of a step to the end of its backward.

    Args:
        root: The sharded model.

    Attributes:
        is_gathered: Whether the forward has begun, and not ended.
        shown: Shows gradients to manual steps, if there are any.
    """

    def __init__(self, root: FSDPModule) -> None:
        self._root = root
        self.is_gathered = self._awaits_backward = False
        self.shown: ShownGradients | None = None

    def begin(self, *, shows_gradients: bool) -> None:
        """Gather the group."""
        if self._awaits_backward:
            self.settle()  # the last forward had no backward
        begin_forward(self._root)
        self.is_gathered = self._awaits_backward = True
        if shows_gradients and self.shown is not None:
            self.shown.show(self._root)  # type: ignore[arg-type]

    def end(self) -> None:
        """End the forward, as a call of the model would."""
        if self.shown is not None:
            self.shown.hide_all()
        if self.is_gathered:
            end_forward(self._root)
            self.is_gathered = False

    def begin_backward(self, loss: Tensor) -> None:
        """Prepare the reduction of the group in the backward from ``loss``."""
        expect_backward(self._root, loss)

    def end_backward(self) -> None:
        """Record that a backward has freed the gathered parameters."""
        self._awaits_backward = False

    def settle(self) -> None:
        """Reshard all groups, if no backward does."""
        settle(self._root)
        self.is_gathered = self._awaits_backward = False
