"""Steps of optimizers in manual optimization, where a module may bypass Lightning's count of global steps."""

from collections.abc import Iterable
from typing import Any

__all__ = ["OptimizerSteps"]


class OptimizerSteps:
    """Counts the steps of optimizers by hooks. Without a known optimizer, every batch is a step."""

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self.any = False  # since `forget`
        self.listens = self.every_batch = False

    def listen(self, optimizers: Iterable[Any]) -> None:
        """Register hooks on ``optimizers``."""
        optimizers = [*optimizers]
        self.listens, self.every_batch = True, not optimizers
        self._handles = [
            optimizer.register_step_post_hook(self._note)
            for optimizer in optimizers
            if hasattr(optimizer, "register_step_post_hook")
        ]

    def forget(self) -> None:
        """Wait for the next step."""
        self.any = False

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.any = self.every_batch = False

    def _note(self, *_: Any) -> None:
        self.any = True
