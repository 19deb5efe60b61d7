"""The state of one optimizer step."""

from dataclasses import dataclass

__all__ = ["StepState"]


@dataclass
class StepState:
    """The state from the first forward of an optimizer step until the optimizer has stepped.

    An evaluation step has its own state.

    Args:
        number: The number of earlier optimizer steps.
        name: The method of the module that runs, or ran last.
        is_manual: Whether ``training_step`` calls backward and steps optimizers itself.
        accumulates: Whether the current microbatch is not the last.
        has_accumulated: Whether the previous microbatch was not the last.
    """

    number: int = 0
    name: str = "training_step"
    is_manual: bool = False
    accumulates: bool = False
    has_accumulated: bool = False

    @property
    def is_training(self) -> bool:
        """Whether a backward may follow."""
        return self.name == "training_step"
