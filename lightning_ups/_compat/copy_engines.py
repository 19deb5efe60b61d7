"""Gathers by a GPU's copy engines, which take no multiprocessor from what computes beside them.

NCCL 2.28 and newer does so within a host if its groups are told to, and what is gathered lies in memory that the ranks
of the group know of one another. FSDP2 of torch 2.13 can ask for such memory; one class does here, for 2.11 as well.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.cuda import nccl
from torch.distributed import _symmetric_memory as symmetric
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather
from typing_extensions import override

__all__ = ["gather_by_copy_engines", "lacks_copy_engines"]

_FIRST = (2, 28)  # of NCCL's releases


def lacks_copy_engines() -> str | None:
    """Say what is missing here for a gather by copy engines."""
    if (release := nccl.version()) < _FIRST:
        return f"NCCL {'.'.join(map(str, release))} gathers by multiprocessors only; 2.28 is the first that need not"
    if not hasattr(symmetric, "get_mem_pool") or not hasattr(dist.ProcessGroupNCCL, "NCCL_CTA_POLICY_ZERO"):
        return "this torch cannot make memory that ranks know of one another"
    return None


def gather_by_copy_engines(modules: Iterable[FSDPModule]) -> None:
    """Let copy engines gather the parameters of ``modules``, which FSDP2 sharded, where their groups are told to."""
    gather = _Gather()
    for module in modules:
        module.set_custom_all_gather(gather)


class _Gather(AllGather):
    """Gathers in memory that the ranks of a group know of one another."""

    def __init__(self) -> None:
        symmetric.set_backend("NCCL")
        self._connected = set[str]()

    @override
    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        with torch.cuda.use_mem_pool(symmetric.get_mem_pool(device)):
            return torch.empty(size, dtype=dtype, device=device)

    @override
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        if group.group_name not in self._connected:  # NCCL connects at a group's first collective
            dist.all_reduce(output_tensor.new_zeros(1), group=group)
            self._connected.add(group.group_name)
        symmetric.rendezvous(output_tensor, group=group.group_name)  # once for each piece of memory
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)
