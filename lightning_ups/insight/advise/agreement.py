"""Deciding by times on one rank, for all of them: times differ, and ranks must not."""

from collections.abc import Callable

import torch.distributed as dist

__all__ = ["agreed"]


def agreed(find: Callable[[], dict[str, str]], *, by: str) -> dict[str, str]:
    """Return what ``find`` returns on rank 0, which alone calls it; on every rank.

    Args:
        find: Decides.
        by: Who asks, for the error of the ranks that did not fail.

    Raises:
        RuntimeError: On the other ranks, if it failed; rank 0 has its own error.
    """
    found: list[dict[str, str] | None] = [None]
    failure: Exception | None = None
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            found = [find()]
        except Exception as error:  # noqa: BLE001  (whatever it is, the others must not wait for ever)
            failure = error
    if dist.is_initialized():
        dist.broadcast_object_list(found)
    if failure is not None:
        raise failure
    if found[0] is None:
        raise RuntimeError(
            f"{by} could not be decided on rank 0."
            " It times the layers there, for all ranks, and says in its own error what failed."
            " See the error of rank 0."
        )
    return found[0]
