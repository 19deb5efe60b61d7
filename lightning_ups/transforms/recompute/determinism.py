"""Checks that the second run of a recomputed block equals its first."""

import warnings
from collections.abc import Sequence

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError

from lightning_ups._compat.torch.tensors.autograd import has_values, outside_modes

__all__ = ["Samples", "note_recomputed_otherwise"]

_NUMBERS = 4096  # of each tensor, at most
_OF_ANOTHER_PATH = ("not found in storage",)  # text of a selective checkpoint if other operators run
_CAUSE = (
    "Its forward depends on state that changes between the two runs: a list, a dictionary or an object that it"
    " modifies, another random generator, or global state."
)
_CURE = (
    "Leave the block out with ActivationCheckpoint(blocks=[...]), or keep such state in a"
    " buffer or a plain attribute of the module."
)


class Samples:
    """Samples of what the first run of a block saves, compared with those of the second.

    A few values of each tensor, so that the first step stays cheap. The comparison is tolerant: kernels may differ in
    the last bits.
    """

    def __init__(self) -> None:
        self._first: list[torch.Tensor | None] = []
        self._again: list[torch.Tensor | None] = []

    def see_first(self, tensor: torch.Tensor) -> None:
        """Sample a tensor that the first run saves."""
        self._first.append(_sample(tensor))

    def see_again(self, tensor: torch.Tensor) -> None:
        """Sample a tensor that the second run saves."""
        self._again.append(_sample(tensor))

    def check(self, name: str) -> None:
        """Warn if the second run of the block ``name`` has saved other values than the first.

        A kernel may leave part of a saved tensor uninitialized, without any effect on later tensors. (There is also no
        effect if products are kept and a difference comes before one.) Synchronizes.

        Raises:
            RuntimeError: If later tensors differ, too.
        """
        apart = self._apart()
        if True not in apart:
            return
        after = apart[apart.index(True) :]
        if 1 < after.count(True) > len(after) / 2:
            raise RuntimeError(
                f"ActivationCheckpoint recomputed {name} for backward, and the result differs from that of the forward:"
                f" gradients would be wrong. {_CAUSE} {_CURE}"
            ) from None  # usually the run was just ended by torch, once it had all that backward needs
        warnings.warn(
            f"ActivationCheckpoint recomputed {name} for backward, and {apart.count(True)} of {len(apart)} tensors"
            " differ from those of the forward. Unless these contain memory that a kernel leaves uninitialized,"
            f" gradients are wrong. {_CAUSE} {_CURE}",
            stacklevel=2,
        )

    def _apart(self) -> list[bool]:
        pairs = [
            (one, other)
            for one, other in zip(self._first, self._again, strict=False)  # the second run stops as early as it can
            if one is not None and other is not None and one.shape == other.shape and one.dtype == other.dtype
        ]
        self._first, self._again = [], []
        if not pairs:
            return []
        with outside_modes(), torch.no_grad():
            # Non-finite values are not compared.
            return [
                bool(((one.float() - other.float()).norm() > _tolerance(one) * one.float().norm()).item())
                for one, other in pairs
            ]


def _tolerance(tensor: torch.Tensor) -> float:
    return 1e-3 if tensor.dtype in (torch.float32, torch.float64) else 5e-2


def _sample(tensor: torch.Tensor) -> torch.Tensor | None:
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return None
    if not (tensor.is_floating_point() or tensor.dtype is torch.bool) or not has_values(tensor):
        return None
    with outside_modes(), torch.no_grad():
        return tensor.detach()[_places(tensor.shape)].clone()


def _places(shape: Sequence[int]) -> tuple[slice, ...]:
    """Return a slice of each dimension, which together select a few values as a view."""
    left, parts = _NUMBERS, []
    for i, size in enumerate(shape):
        part = max(1, min(size, round(left ** (1 / (len(shape) - i)))))
        parts.append(slice(None, None, max(1, -(-size // part))))
        left //= part
    return tuple(parts)


def note_recomputed_otherwise(error: BaseException, *, name: str) -> None:
    """Add an explanation to ``error`` if the second run of a block called other operators than the first.

    Args:
        error: The error that ended the run.
        name: The last block that was recomputed.
    """
    if isinstance(error, CheckpointError) or any(words in str(error) for words in _OF_ANOTHER_PATH):
        error.add_note(
            f"ActivationCheckpoint recomputed {name} for backward, and it called other operators than the forward."
            f" {_CAUSE} {_CURE}"
        )
