"""Records the checkpoints that a run has saved, and which of them it can roll back to."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.optim import Optimizer

from lightning_ups.state.checkpoint import is_complete

__all__ = ["Layout", "Saved", "layout_of"]

Layout = tuple[tuple[int, ...], ...]


def layout_of(optimizers: Iterable[Optimizer]) -> Layout:
    """Return the number of parameters in each group: state of an optimizer with other groups cannot be loaded."""
    return tuple(tuple(len(group["params"]) for group in optimizer.param_groups) for optimizer in optimizers)


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    step: int
    path: Path
    layout: Layout


class Saved:
    """Records complete checkpoints of a run, with their step and parameter groups."""

    def __init__(self) -> None:
        self._all: list[_Checkpoint] = []

    def add(self, path: Path, *, step: int, layout: Layout) -> None:
        """Record a checkpoint, replacing an earlier one at the same path."""
        self.forget(path)
        self._all.append(_Checkpoint(step, path, layout))

    def forget(self, path: Path) -> None:
        """Record that ``path`` has no such checkpoint any more."""
        self._all = [each for each in self._all if each.path != path]

    def newest(self, *, step: int, layout: Layout) -> Path | None:
        """Return the newest one from before ``step`` that is still complete and fits ``layout``."""
        return next((each.path for each in reversed(self._before(step)) if each.layout == layout), None)

    def others(self, *, step: int, layout: Layout) -> list[Path]:
        """Return the complete ones from before ``step`` that do not fit ``layout``."""
        return [each.path for each in self._before(step) if each.layout != layout]

    def undo(self, *, step: int) -> list[Path]:
        """Forget those from after ``step``, and return those of them that are still complete."""
        undone = [each.path for each in self._all if each.step > step and is_complete(each.path)]
        self._all = [each for each in self._all if each.step <= step]
        return undone

    def _before(self, step: int) -> Sequence[_Checkpoint]:
        return [each for each in self._all if each.step <= step and is_complete(each.path)]
