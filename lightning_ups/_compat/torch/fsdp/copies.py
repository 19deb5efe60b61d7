"""Runs FSDP2's copies out of gathered parameters on a separate stream, and into the input of a reduction.

FSDP2 gathers the parameters of a block into one buffer, ordered by rank, and splits it by copies on the compute stream.
On a separate stream, the copy begins when the gather ends, while the previous block still computes.

The parameters are then in memory of that stream. It may reuse a block's memory once the compute stream has freed it:
each time parameters are freed, an event is recorded on the compute stream, and the next copy waits for the last event.
If parameters are kept from forward to backward, it is the event of the previous step.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from typing_extensions import override

from lightning_ups._compat.patches import FSDP, applied

_MODULE = f"{FSDP}_fsdp_param_group"
_FREES = ("_to_sharded", "_to_sharded_post_forward")


@contextmanager
def copying_beside() -> Iterator[None]:
    """Copy on a separate stream on GPUs while the context is open."""
    beside: list[_Beside] = []

    def copying(copy: Callable[..., None]) -> Callable[..., None]:
        beside[:] = [_Beside(copy)]
        return beside[0].__call__

    def marking(free: Callable[[Any], None]) -> Callable[[Any], None]:
        @wraps(free)
        def free_and_mark(group: Any) -> None:
            free(group)
            beside[0].mark_freed(group.device)

        return free_and_mark

    with ExitStack() as stack:
        stack.enter_context(applied(f"{_MODULE}:foreach_all_gather_copy_out", copying, once=True))
        for name in _FREES:
            stack.enter_context(applied(f"{_MODULE}:FSDPParamGroup.{name}", marking, once=True))
        yield


class _Beside:
    """Copies on one stream per device."""

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
        """Let later copies wait for the work that is queued on the compute stream now."""
        if device in self._streams:
            self._freed[device] = torch.cuda.current_stream(device).record_event()


def putting_together(by: Callable[[list[Tensor], Tensor, int], bool]) -> AbstractContextManager[None]:
    """Let ``by`` copy the gradients of a group together for their reduction while the context is open.

    It gets the gradients, the buffer, and the number of ranks. If it returns False, without writing, torch copies.
    """

    def asking(copy_in: Callable[..., None]) -> Callable[..., None]:
        def foreach_reduce_scatter_copy_in(
            unsharded_grads: list[Tensor], reduce_scatter_input: Tensor, world_size: int, *args: Any, **kwargs: Any
        ) -> None:
            if not by(unsharded_grads, reduce_scatter_input, world_size):
                copy_in(unsharded_grads, reduce_scatter_input, world_size, *args, **kwargs)

        return foreach_reduce_scatter_copy_in

    return applied(f"{FSDP}_fsdp_collectives:foreach_reduce_scatter_copy_in", asking)


class _AsReal(DefaultReduceScatter):
    @override
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(_real(output_tensor), _real(input_tensor), *args, **kwargs)


def reduce_as_real(module: FSDPModule) -> None:
    """Let ``module`` reduce complex gradients as pairs of real numbers, since NCCL has no complex dtypes."""
    module.set_custom_reduce_scatter(_AsReal())


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor).flatten() if tensor.is_complex() else tensor
