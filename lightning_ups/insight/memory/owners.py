"""The owners of a device's memory, and errors that mean out of memory."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_ups._compat.torch.tensors.autograd import storages
from lightning_ups.insight.memory.account import Kind, Moment, allocated

_TEXTS = (
    "out of memory",  # CUDA, HIP, XPU, MPS, NCCL
    "can't allocate memory",  # the CPU's
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether ``error`` or its cause means that an allocator ran out of memory."""
    while error is not None:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return True
        if isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS):
            return True
        error = error.__cause__
    return False


def holders(
    module: nn.Module,
    *,
    optimizers: Iterable[Optimizer] = (),
    blocks: Mapping[str, nn.Module],
    device: torch.device,
    total: int | None = None,
) -> Moment:
    """Return the memory of ``module`` and its optimizers on ``device``, by kind and by block.

    Args:
        module: Its parameters, gradients and buffers are counted.
        optimizers: Their state is counted, and their parameters that are not the module's, as master weights.
        blocks: The owners of parameters, by name.
        device: Memory on other devices is not counted.
        total: The allocated bytes. The rest of them counts as activations, of no block.
    """
    owners: dict[Tensor, str] = {}
    for name, block in blocks.items():
        for tensor in (*block.parameters(), *block.buffers()):
            owners.setdefault(tensor, name)
    seen: set[Any] = set()
    held: dict[tuple[Kind, str], int] = {}

    def add(kind: Kind, tensor: Tensor | None, owner: str = "") -> None:
        for memory, size in storages(tensor) if tensor is not None and _on(tensor, device) else ():
            if memory not in seen:
                seen.add(memory)
                held[kind, owner] = held.get((kind, owner), 0) + allocated(size)

    own = [*module.parameters()]
    for parameter in own:
        add("parameters", parameter, owners.get(parameter, ""))
        add("gradients", parameter.grad, owners.get(parameter, ""))
    for buffer in module.buffers():
        add("buffers", buffer, owners.get(buffer, ""))
    for optimizer in optimizers:
        for parameter in _stepped(optimizer):
            add("master weights", parameter)
            add("gradients", parameter.grad)
        for state in optimizer.state.values():
            for leaf in tree_leaves(state):
                add("optimizer state", leaf if isinstance(leaf, Tensor) else None)
    if total is not None and (rest := total - sum(held.values())) > 0:
        held["activations", ""] = rest
    return Moment(phase="forward", held=held)


def _on(tensor: Tensor, device: torch.device) -> bool:
    return tensor.device.type == device.type and (device.index is None or tensor.device.index == device.index)


def _stepped(optimizer: Optimizer) -> Sequence[nn.Parameter]:
    inner = getattr(optimizer, "inner", optimizer)  # of an optimizer of master weights
    return [parameter for each in (optimizer, inner) for group in each.param_groups for parameter in group["params"]]
