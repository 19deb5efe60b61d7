"""What must be equal on several ranks: replicated parameters, buffers, and batches under tensor parallelism."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_ups._compat.torch.tensors.tensors import local_of
from lightning_ups._compat.torch.versions import NormWithStatistics
from lightning_ups.transforms.random_state import random_state, restore_random_state

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by element size


@torch.no_grad()
def average_gradients(parameters: Iterable[nn.Parameter], *, group: ProcessGroup, unused: bool = False) -> None:
    """Average the gradients of ``parameters`` over ``group``, with one collective per dtype.

    Averaging again after more was added is correct: equal parts average to themselves.

    Args:
        parameters: Parameters with equal values on every rank.
        group: The ranks.
        unused: Whether a missing gradient counts as zero if another rank has one.
    """
    if group.size() == 1:
        return
    parameters = [*parameters]
    if unused:
        _count_missing_as_zero([p for p in parameters if p.requires_grad], group)
    by_type: dict[torch.dtype, list[nn.Parameter]] = {}
    for p in parameters:
        if p.grad is not None and p.grad.is_sparse:
            p.grad = _average_sparse(p.grad, group)
        elif p.grad is not None:
            by_type.setdefault(p.dtype, []).append(p)
    for same in by_type.values():
        gradients = [local_of(p.grad) for p in same if p.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(torch.view_as_real(flat) if flat.is_complex() else flat, group=group)
        flat /= group.size()
        parts = flat.split([gradient.numel() for gradient in gradients])
        torch._foreach_copy_(gradients, [part.view_as(g) for part, g in zip(parts, gradients, strict=True)])


def on_any_rank(here: Sequence[int], *, group: ProcessGroup, device: torch.device) -> list[int]:
    """Return the maximum of each number over ``group``. A collective."""
    numbers = torch.tensor(here, dtype=torch.uint8, device=device)
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=group)
    return numbers.tolist()


_DENSE, _SPARSE = 1, 2


def _count_missing_as_zero(parameters: Sequence[nn.Parameter], group: ProcessGroup) -> None:
    if not parameters:
        return
    here = [0 if p.grad is None else _SPARSE if p.grad.is_sparse else _DENSE for p in parameters]
    for p, kind in zip(parameters, on_any_rank(here, group=group, device=parameters[0].device), strict=True):
        if p.grad is None and kind:
            zero = torch.zeros_like(p)
            p.grad = zero.to_sparse(1) if kind == _SPARSE else zero


def _average_sparse(gradient: Tensor, group: ProcessGroup) -> Tensor:
    total = gradient.coalesce()  # a device may have the same row several times
    dist.all_reduce(total, group=group)
    return total / group.size()


@torch.no_grad()
def give_first(tensors: Iterable[Tensor], *, group: ProcessGroup) -> None:
    """Broadcast ``tensors``, in place, from the first rank of ``group``."""
    if group.size() == 1:
        return
    under_way = []
    for tensor in map(_each_once, tensors):
        flat = tensor.contiguous()  # collectives use memory as it is: a view of a part would get its neighbors'
        sent = torch.view_as_real(flat) if flat.is_complex() else flat
        under_way.append((dist.broadcast(sent, group=group, group_src=0, async_op=True), tensor, flat))
    for work, tensor, flat in under_way:
        if work is not None:
            work.wait()
        if flat is not tensor:
            tensor.copy_(flat)


def _each_once(tensor: Tensor) -> Tensor:
    """Return ``tensor`` without expanded dimensions."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


class BufferSync:
    """Broadcasts the buffers that change during training from the first rank, before each step.

    Running statistics of norms are known to change. The first step shows which other buffers do: all ranks agree on
    them once, so that later broadcasts need no communication to decide. If one module changes a buffer, any other
    module of its class may change it in a later step, such as one of several experts; if no module of a class ran, it
    is assumed not to change.

    Args:
        module: The module with the buffers.
        group: The ranks.
    """

    def __init__(self, module: nn.Module, *, group: ProcessGroup) -> None:
        self._module, self._group = module, group
        self._names: tuple[str, ...] | None = None
        self._before: Mapping[str, tuple[int, int]] = {}
        self._stepped = False
        self._idle: set[nn.Module] = set()

    def note_step(self) -> None:
        """Record that a training step has run."""
        self._stepped = True

    def note_idle(self, modules: Iterable[nn.Module]) -> None:
        """Record which ``modules`` the first training step did not call."""
        if not self._stepped:
            self._idle = {inner for module in modules for inner in module.modules()}

    def __call__(self) -> None:
        """Broadcast what may have changed. Every rank calls it before each step that starts an accumulation."""
        if self._group.size() == 1:
            return
        buffers = dict(self._module.named_buffers())
        if self._names is None and self._stepped:
            self._names = self._agree(buffers)
        names = [name for name in buffers if self._names is None or name in self._names]
        give_first((buffers[name] for name in names), group=self._group)
        if self._names is None:
            self._before = _versions(buffers)

    def _agree(self, buffers: Mapping[str, Tensor]) -> tuple[str, ...]:
        """Return what changed on any rank. A collective, called once."""
        now = _versions(buffers)
        modules = dict(self._module.named_modules())
        kinds = {name: (type(modules[name.rpartition(".")[0]]), name.rpartition(".")[2]) for name in buffers}
        may_change = {
            kind
            for name, kind in kinds.items()
            if issubclass(kind[0], NormWithStatistics) or now[name] != self._before.get(name)
        }
        ran = {kind for name, kind in kinds.items() if modules[name.rpartition(".")[0]] not in self._idle}
        may_change |= {*kinds.values()} - ran
        names = [*buffers]
        if not names:
            return ()
        changed = [kinds[name] in may_change for name in names]
        device = next(iter(buffers.values())).device
        anywhere = torch.tensor(changed, dtype=torch.int32, device=device)
        dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, group=self._group)
        return tuple(name for name, yes in zip(names, anywhere.tolist(), strict=True) if yes)


def _versions(buffers: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    return {name: (id(buffer), buffer._version) for name, buffer in buffers.items()}


# Ranks that compute one batch together


def share_random_state(group: ProcessGroup) -> None:
    """Continue with the random state of the first rank. Under `seed_everything` this changes nothing."""
    state = [random_state()]
    dist.broadcast_object_list(state, group=group, group_src=0)
    restore_random_state(state[0])


def check_one_batch(batch: Any, *, group: ProcessGroup, size: str = "tensor_parallel_size") -> None:
    """Check that all ranks of ``group`` have the same tensors in their ``batch``. A collective."""
    own = [(tuple(tensor.shape), str(tensor.dtype), _sum(tensor)) for tensor in _tensors(batch)]
    seen: list[Any] = [None] * group.size()
    dist.all_gather_object(seen, own, group=group)
    if all(other == own for other in seen):
        return
    ranks = " and ".join(map(str, dist.get_process_group_ranks(group)))
    raise ValueError(
        f"Ranks {ranks} were given different batches. With {size}={group.size()} they must compute parts"
        " of the same batch. Keep Trainer(use_distributed_sampler=True), or create your sampler with"
        " trainer.distributed_sampler_kwargs, and draw augmentations from torch's generator."
    )


def _tensors(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors in a container, which need not be one that can be rebuilt."""
    if isinstance(batch, Tensor):
        yield from batch.unbind() if batch.is_nested else (batch,)
        return
    parts: Any = ()
    if isinstance(batch, Mapping):
        parts = batch.values()
    elif isinstance(batch, list | tuple):
        parts = batch
    elif is_dataclass(batch):
        parts = [getattr(batch, field.name, None) for field in fields(batch)]
    for part in parts:
        yield from _tensors(part)


@torch.no_grad()
def _sum(tensor: Tensor) -> int:
    """Return a sum of the bits of ``tensor`` that depends on the order of its rows."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return 0
    tensor = tensor.resolve_conj().resolve_neg()
    numbers = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = numbers.contiguous().view(_INTEGERS[numbers.element_size()])
    sums = flat.reshape(flat.shape[0] if flat.dim() else 1, -1).sum(1, dtype=torch.int64)
    return int((sums * torch.arange(1, len(sums) + 1, device=sums.device)).sum())
