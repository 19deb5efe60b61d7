"""The interface of checks that find one kind of mistake in the steps of a sharded model."""

from contextlib import ExitStack

from lightning_ups.transforms.sharding import StepState

__all__ = ["StepCheck"]


class StepCheck:
    """One check of each step. A strategy calls the methods of its checks, in the order of the list.

    A method raises on all ranks if it finds a mistake. Its collectives must run on all ranks.
    """

    def begin(self, step: StepState, undo: ExitStack) -> None:
        """Called before a step, with the model's own group gathered; ``undo`` is closed when the step ends or fails."""

    def end(self, step: StepState) -> None:
        """Called after a step, in reverse order, while the model's own group is still gathered."""

    def before_free(self) -> None:
        """Called before the model's own group is freed; several times in a manual step."""

    def before_backward(self, step: StepState) -> None:
        """Called before each backward."""

    def after_reduction(self) -> None:
        """Called after the last backward of an optimizer step, when all gradients are reduced."""
