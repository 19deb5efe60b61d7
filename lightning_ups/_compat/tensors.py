"""What torch knows of a tensor and tells nobody by a public name."""

from typing import Any

from torch import Tensor

__all__ = ["count_writes", "plain_memory"]


def count_writes(tensor: Tensor) -> int:
    """Return how often ``tensor`` was written in place; writes through ``tensor.data`` are not counted."""
    return tensor._version


def plain_memory(tensor: Tensor | None) -> Any:
    """Return the tensor whose memory ``tensor`` is: itself, but for weights that torchao gathers in float8."""
    return tensor._tensor if type(tensor).__name__ == "WeightWithDynamicFloat8CastTensor" else tensor  # type: ignore[union-attr]
