"""Gradient accumulation over microbatches: when gradients are reduced, and what stays gathered in between."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_ups._compat.torch.fsdp.state import unreduced
from lightning_ups.transforms.fsdp.step_check import StepCheck
from lightning_ups.transforms.quoted import listed

__all__ = [
    "Accumulation",
    "LateGradients",
    "Sync",
    "SyncChoice",
    "choose_sync",
    "free_memory",
    "unsharded_gradient_bytes",
]

Sync = Literal["auto", "last", "every"]

_SHARE = 0.25  # of the free memory after sharding; the rest is for activations and the optimizer


@dataclass(frozen=True, kw_only=True)
class SyncChoice:
    """When gradients are reduced, and why.

    Args:
        sync: ``"last"``: once per optimizer step. ``"every"``: after each microbatch.
        gradient_bytes: The bytes that ``"last"`` keeps on each device between microbatches.
        reason: The reason, for the report.
    """

    sync: Literal["last", "every"]
    gradient_bytes: int
    reason: str


def choose_sync(
    sync: Sync, *, gradient_bytes: int, free_bytes: int | None, looked_at_by: Sequence[str] = ()
) -> SyncChoice:
    """Return ``sync``, or for ``"auto"`` the choice with the fewest reductions that fits into memory.

    Args:
        sync: The user's choice.
        gradient_bytes: The bytes that ``"last"`` keeps on each device between microbatches.
        free_bytes: Free memory of the device; None: unknown.
        looked_at_by: Hooks that read gradients after each microbatch, which requires a reduction each time.

    Raises:
        ValueError: If ``sync`` is unknown.
    """
    if sync not in get_args(Sync):
        raise ValueError(
            f"sync={sync!r} is not a known choice."
            " It says after which microbatches of an optimizer step gradients are reduced."
            f" Use one of {get_args(Sync)}."
        )
    if sync != "auto":
        return SyncChoice(sync=sync, gradient_bytes=gradient_bytes, reason="as asked")
    if looked_at_by:
        reason = f"{', '.join(looked_at_by)} may read or write gradients"
        return SyncChoice(sync="every", gradient_bytes=gradient_bytes, reason=reason)
    if free_bytes is None:
        return SyncChoice(sync="last", gradient_bytes=gradient_bytes, reason="the free memory is not known")
    fits = gradient_bytes <= _SHARE * free_bytes
    compared = f"{gradient_bytes / 2**30:.2f} GiB of whole gradients {'fit' if fits else 'do not fit'}"
    reason = f"{compared} into a quarter of {free_bytes / 2**30:.2f} GiB"
    return SyncChoice(sync="last" if fits else "every", gradient_bytes=gradient_bytes, reason=reason)


@dataclass(frozen=True, kw_only=True)
class Accumulation:
    """How the optimizer steps of a run accumulate gradients.

    Args:
        choice: When gradients are reduced.
        between: Hooks that run between microbatches and may read or write weights.
        see_gradients: Those of the hooks that may read or write gradients.
    """

    choice: SyncChoice
    between: Sequence[str]
    see_gradients: Sequence[str]

    @contextmanager
    def microbatch(self, roots: Sequence[FSDPModule], *, replicated: bool, keeps_all: bool) -> Iterator[None]:
        """Run a microbatch that is not the last of its optimizer step.

        Args:
            roots: The modules that are unsharded at the end of a backward, the sharded model first. They stay so for
                the next microbatch unless a hook reads weights.
            replicated: Whether the mesh has replicas. With ``sync="every"`` these are then reduced only once.
            keeps_all: Whether all modules stay unsharded from forward to backward.
        """
        keeps_all = keeps_all and not self.between
        kept = roots[:1] if keeps_all else () if self.between else roots
        if self.choice.sync == "last":
            roots[0].set_requires_gradient_sync(False)
        elif replicated and not self.see_gradients:
            roots[0].set_requires_all_reduce(False)
        for module in kept:
            module.set_reshard_after_backward(False, recurse=keeps_all)
        try:
            yield
        finally:
            roots[0].set_requires_gradient_sync(True)
            for module in kept:
                module.set_reshard_after_backward(True, recurse=keeps_all)


class LateGradients(StepCheck):
    """Finds gradients, in the first optimizer step, that arrived after their group was reduced.

    Args:
        root: The sharded model.

    Raises:
        RuntimeError: After the reduction, if there are any: they would be added to the next step.
    """

    def __init__(self, root: FSDPModule) -> None:
        self._root, self._looks = root, True

    @override
    def after_reduction(self) -> None:
        looks, self._looks = self._looks, False
        if looks and (left := unreduced(self._root)):
            raise RuntimeError(
                f"The gradients of {listed(left)} arrived after their group was reduced, and would be added to the"
                " next step."
                " These parameters are read outside the forward of the module that gathers them."
                f" Name them: FSDP2Strategy(outside={left[:3]})."
            )


def unsharded_gradient_bytes(model: nn.Module, *, reduce_dtype: torch.dtype | None, tensor_size: int = 1) -> int:
    """Return the bytes that unsharded gradients take on each device while they wait to be reduced."""
    return sum(
        p.numel() // tensor_size * (reduce_dtype or p.dtype).itemsize
        for p in model.parameters()
        if p.requires_grad and isinstance(p, DTensor)
    )


def free_memory(device: torch.device) -> int | None:
    """Return the number of free bytes on ``device``, or None if it is unknown."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
