"""Hearing that optimizers step which a module steps by hand: past Lightning's wrapper it counts no global step."""

from collections.abc import Iterable
from typing import Any

__all__ = ["StepsHeard"]


class StepsHeard:
    """Hears the steps of optimizers; where none is known, every batch is taken for a step."""

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self.any = False  # since `forget`
        self.listens = self.every_batch = False

    def listen(self, optimizers: Iterable[Any]) -> None:
        """Begin to hear ``optimizers``."""
        optimizers = [*optimizers]
        self.listens, self.every_batch = True, not optimizers
        self._handles = [
            optimizer.register_step_post_hook(self._note)
            for optimizer in optimizers
            if hasattr(optimizer, "register_step_post_hook")
        ]

    def forget(self) -> None:
        """Hear the next one."""
        self.any = False

    def close(self) -> None:
        """Leave the optimizers as they were."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.any = self.every_batch = False

    def _note(self, *_: Any) -> None:
        self.any = True
