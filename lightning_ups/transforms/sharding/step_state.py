"""The state of one optimizer step."""

from dataclasses import dataclass

__all__ = ["StepState"]


@dataclass
class StepState:
    """What holds from the first forward of an optimizer step until the optimizer has stepped.

    An evaluation step has a state of its own, which ends with it.

    Args:
        number: How many optimizer steps were made before.
        name: The method of the module that runs, or ran last.
        is_manual: ``training_step`` runs, and calls backward and steps optimizers itself.
        accumulates: The present microbatch is not the last.
        has_accumulated: The microbatch before was not the last.
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
