"""The checkpoints that a run has saved, and which of them it can go back to."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.optim import Optimizer

from lightning_ups.state.checkpoint import is_complete

__all__ = ["Layout", "Saved", "layout_of"]

Layout = tuple[tuple[int, ...], ...]


def layout_of(optimizers: Iterable[Optimizer]) -> Layout:
    """Return how many parameters each group has: the state of an optimizer with other groups cannot be loaded."""
    return tuple(tuple(len(group["params"]) for group in optimizer.param_groups) for optimizer in optimizers)


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    step: int
    path: Path
    layout: Layout


class Saved:
    """Keeps where a run has saved all that it needs to go on, and at which step, with which groups of parameters."""

    def __init__(self) -> None:
        self._all: list[_Checkpoint] = []

    def add(self, path: Path, *, step: int, layout: Layout) -> None:
        """Note a checkpoint, whatever lay there before."""
        self.forget(path)
        self._all.append(_Checkpoint(step, path, layout))

    def forget(self, path: Path) -> None:
        """Note that ``path`` holds no such checkpoint any more."""
        self._all = [each for each in self._all if each.path != path]

    def newest(self, *, step: int, layout: Layout) -> Path | None:
        """Return the newest one from before ``step`` that still is whole and fits ``layout``."""
        return next((each.path for each in reversed(self._before(step)) if each.layout == layout), None)

    def others(self, *, step: int, layout: Layout) -> list[Path]:
        """Return those from before ``step`` that are whole and do not fit ``layout``."""
        return [each.path for each in self._before(step) if each.layout != layout]

    def undo(self, *, step: int) -> list[Path]:
        """Forget those from after ``step``, and return which of them still are whole."""
        undone = [each.path for each in self._all if each.step > step and is_complete(each.path)]
        self._all = [each for each in self._all if each.step <= step]
        return undone

    def _before(self, step: int) -> Sequence[_Checkpoint]:
        return [each for each in self._all if each.step <= step and is_complete(each.path)]
