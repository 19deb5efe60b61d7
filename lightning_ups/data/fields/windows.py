"""Windows of trajectories, as pairs of what a model is given and what it predicts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset

Batch = tuple[Tensor, Tensor, Tensor]


class Trajectories(Protocol):
    """Trajectories of equal length on one grid, in memory or in a file."""

    fields: tuple[str, ...]
    grid: tuple[int, ...]
    count: int
    frames: int
    conditions: Tensor  # [count, P]

    def read(self, trajectory: int, start: int, length: int) -> Tensor:
        """Return the frames [length, channels, *grid] from ``start`` on, in float32."""
        ...


class InMemory:
    """Trajectories in a tensor.

    Args:
        films: [count, frames, channels, *grid].
        conditions: What each trajectory is known by [count, P].
        fields: Names of the channels.
    """

    def __init__(self, films: Tensor, conditions: Tensor, *, fields: tuple[str, ...]) -> None:
        self._films, self.conditions, self.fields = films, conditions, fields
        self.count, self.frames, self.grid = films.shape[0], films.shape[1], tuple(films.shape[3:])

    def read(self, trajectory: int, start: int, length: int) -> Tensor:
        """Return the frames [length, channels, *grid] from ``start`` on."""
        return self._films[trajectory, start : start + length]


@dataclass(frozen=True, slots=True)
class Statistics:
    """The mean and standard deviation of each channel and of each condition over the training trajectories."""

    mean: Tensor
    std: Tensor
    condition_mean: Tensor
    condition_std: Tensor

    @classmethod
    def of(cls, chosen: Sequence[tuple[Trajectories, int]], *, at_most: int | None = None) -> "Statistics":
        """Read the trajectories, or ``at_most`` that many of them, evenly spread, one after the other."""
        conditions = torch.stack([source.conditions[index] for source, index in chosen]).double()
        if at_most is not None and len(chosen) > at_most:
            chosen = [chosen[place * len(chosen) // at_most] for place in range(at_most)]
        count, mean, squares = 0, torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        for source, index in chosen:
            values = source.read(index, 0, source.frames).double().transpose(0, 1).flatten(1)
            added, own_mean = values.shape[1], values.mean(1)
            shift = own_mean - mean
            # Sums of two parts are joined by their difference, since large sums of squares would cancel.
            squares = (
                squares + (values - own_mean[:, None]).square().sum(1) + shift**2 * count * added / (count + added)
            )
            mean = mean + shift * added / (count + added)
            count += added
        condition_std = (conditions - conditions.mean(0)).square().mean(0).sqrt()
        return cls(
            mean.float(), _not_zero((squares / count).sqrt()), conditions.mean(0).float(), _not_zero(condition_std)
        )

    def normalized(self, fields: Tensor) -> Tensor:
        """Return ``fields`` [..., channels, *grid] with mean 0 and standard deviation 1."""
        mean, std = self._columns(fields)
        return (fields - mean) / std

    def denormalized(self, fields: Tensor) -> Tensor:
        """Return ``fields`` in the units of the data."""
        mean, std = self._columns(fields)
        return fields * std + mean

    def as_dict(self) -> dict[str, Tensor]:
        """Return the tensors by name."""
        return {name: getattr(self, name) for name in self.__slots__}

    def _columns(self, fields: Tensor) -> tuple[Tensor, Tensor]:
        # Batches are [batch, time, channels, *grid].
        ones = [1] * (fields.dim() - 3)
        return self.mean.to(fields.device).view(-1, *ones), self.std.to(fields.device).view(-1, *ones)


def _not_zero(std: Tensor) -> Tensor:
    std = std.float()
    return torch.where(std > 0, std, 1)  # a constant channel stays constant


class Windows(Dataset[Batch]):
    """A dataset of (inputs, targets, conditions), normalized: two windows of time, one after the other.

    A batch is ([batch, inputs, channels, *grid], [batch, targets, channels, *grid], [batch, P]).

    Args:
        chosen: Trajectories, each as its source and its index there.
        statistics: To normalize with.
        inputs: Frames that a model is given.
        targets: Frames that follow.
        stride: Frames from the beginning of a window to that of the next.

    Raises:
        ValueError: If no trajectory is long enough.
    """

    def __init__(
        self,
        chosen: Sequence[tuple[Trajectories, int]],
        *,
        statistics: Statistics,
        inputs: int,
        targets: int,
        stride: int = 1,
    ) -> None:
        self._chosen, self._statistics = list(chosen), statistics
        self._inputs, self._length, self._stride = inputs, inputs + targets, stride
        counts = [max(0, (source.frames - self._length) // stride + 1) for source, _ in self._chosen]
        self._ends = torch.tensor(counts).cumsum(0)
        if not sum(counts):
            longest = max((source.frames for source, _ in self._chosen), default=0)
            raise ValueError(
                f"inputs={inputs} and targets={targets} need {self._length} frames, and the longest of"
                f" {len(self._chosen)} trajectories has {longest}. Use shorter windows or longer trajectories."
            )

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Batch:
        inputs, targets, conditions = self.__getitems__([index])
        return inputs[0], targets[0], conditions[0]

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Return a batch. A DataLoader calls this in place of ``__getitem__``."""
        frames, conditions = [], []
        for index in indices:
            place = int(torch.searchsorted(self._ends, index, right=True))
            window = index - (int(self._ends[place - 1]) if place else 0)
            source, trajectory = self._chosen[place]
            frames.append(source.read(trajectory, window * self._stride, self._length))
            conditions.append(source.conditions[trajectory])
        known = self._statistics
        films = known.normalized(torch.stack(frames))
        places = (torch.stack(conditions).float() - known.condition_mean) / known.condition_std
        return films[:, : self._inputs], films[:, self._inputs :], places
