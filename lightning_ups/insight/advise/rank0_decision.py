"""Decisions by measured times: rank 0 decides for all ranks, since times differ between ranks."""

from collections.abc import Callable

import torch.distributed as dist

__all__ = ["decide_on_rank0"]


def decide_on_rank0(find: Callable[[], dict[str, str]], *, by: str) -> dict[str, str]:
    """Call ``find`` on rank 0 and return its result on every rank.

    Args:
        find: Decides.
        by: The caller, for the error on other ranks.

    Raises:
        RuntimeError: On the other ranks, if rank 0 failed.
    """
    found: list[dict[str, str] | None] = [None]
    failure: Exception | None = None
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            found = [find()]
        except Exception as error:  # noqa: BLE001  (the other ranks must not wait forever)
            failure = error
    if dist.is_initialized():
        dist.broadcast_object_list(found)
    if failure is not None:
        raise failure
    if found[0] is None:
        raise RuntimeError(f"{by} failed on rank 0, which times the layers for all ranks. See the error of rank 0.")
    return found[0]
