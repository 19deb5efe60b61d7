"""What looks at the steps of a sharded model for one kind of mistake."""

from contextlib import ExitStack

from lightning_ups.transforms.sharding import StepState

__all__ = ["StepCheck"]


class StepCheck:
    """One check of each step. A strategy calls the methods of its checks, in the order of the list, at these moments.

    A method raises, on all ranks, where it finds a mistake. What it asks other ranks, all must ask.
    """

    def begin(self, step: StepState, undo: ExitStack) -> None:
        """Called before a step runs, with the model's own group gathered; ``undo`` is closed when it ends or fails."""

    def end(self, step: StepState) -> None:
        """Called when the step has returned, in the opposite order, while the model's own group is still gathered."""

    def before_free(self) -> None:
        """Called before the model's own group is freed, which a manual step does several times."""

    def before_backward(self, step: StepState) -> None:
        """Called before each backward."""

    def after_reduction(self) -> None:
        """Called after the last backward of an optimizer step, when all gradients are reduced."""
