"""Where FSDP2 copies what was gathered into the parameters: beside the computation, not within it.

It gathers the parameters of a block in one piece, rank after rank, and copies them apart in the stream that computes.
In a stream of its own the copy begins when the gather ends, while the block before still computes.

Parameters then lie in memory of that stream. It may take what a block had once the computing stream has freed it; so
each time that parameters are freed is marked in the computing stream, and the next copy waits for the last mark. Where
parameters are kept from forward to backward the mark is that of the step before.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

__all__ = ["copying_beside"]

_FREES = ("_to_sharded", "_to_sharded_post_forward")


@contextmanager
def copying_beside() -> Iterator[None]:
    """Copy on GPUs in a stream of its own while the context is open."""
    group: Any = _fsdp_param_group.FSDPParamGroup
    before = _fsdp_param_group.foreach_all_gather_copy_out
    if isinstance(before, _Beside):  # a context within a context
        yield
        return
    frees = {name: getattr(group, name) for name in _FREES}
    beside = _Beside(before)
    _fsdp_param_group.foreach_all_gather_copy_out = beside  # type: ignore[assignment]
    for name, free in frees.items():
        setattr(group, name, _marked(free, beside))
    try:
        yield
    finally:
        _fsdp_param_group.foreach_all_gather_copy_out = before
        for name, free in frees.items():
            setattr(group, name, free)


class _Beside:
    """Copies in a stream for each device."""

    def __init__(self, copy: Callable[..., None]) -> None:
        self._copy = copy
        self._streams: dict[torch.device, Any] = {}
        self._freed: dict[torch.device, Any] = {}

    def __call__(self, gathered: Any, parameters: Any, *rest: Any) -> None:
        device = gathered.all_gather_output.device
        if device.type != "cuda":
            self._copy(gathered, parameters, *rest)
            return
        computing = torch.cuda.current_stream(device)
        copying = self._streams.get(device)
        if copying is None:
            copying = self._streams[device] = torch.cuda.Stream(device)
            copying.wait_stream(computing)
        if (freed := self._freed.get(device)) is not None:
            copying.wait_event(freed)
        with torch.cuda.stream(copying):
            self._copy(gathered, parameters, *rest)
        computing.wait_stream(copying)

    def mark_freed(self, device: torch.device) -> None:
        """Let no later copy begin before what is in the computing stream now is done."""
        if device in self._streams:
            self._freed[device] = torch.cuda.current_stream(device).record_event()


def _marked(free: Callable[[Any], None], beside: _Beside) -> Callable[[Any], None]:
    @wraps(free)
    def free_and_mark(group: Any) -> None:
        free(group)
        beside.mark_freed(group.device)

    return free_and_mark
