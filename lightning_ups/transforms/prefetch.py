"""Copies batches to the device while the previous step computes.

Note [Memory]. An overlapped copy must not write to memory that queued work still reads or writes. torch's allocator
reuses memory in the order of the stream that allocated it. Memory allocated on a second stream would be reused only
when the host sees that training is done with it (``record_stream``), so a host that is many steps ahead would allocate
more and more. Memory is therefore allocated on the training stream, one step early, followed by a mark: all work that
may use the memory is queued before the mark. The second stream waits for the mark and copies; the training stream waits
for the copy. From then on the tensor is like any other, and the device holds one more batch. Only memory that is given
up before training has waited for its copy is recorded for the second stream.

Note [Order]. Hooks and loaders run at their usual places. When the transfer of a batch moves a tensor to the device, a
copy on the second stream is returned. That copy starts immediately, while the device is still at the previous step if
the host is ahead; or it was started in the middle of that step (`CopiesAhead.start`), if the batch was already known.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

MIN_BYTES = 2**16  # a smaller copy takes less time than overlapping it
_Kind = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


class Lane:
    """A second stream of a GPU, on which copies overlap with training."""

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self._stream = torch.cuda.Stream(self.device)

    def is_pinned(self, source: Tensor) -> bool:
        """Return whether the device can read ``source`` on the host directly."""
        return source.is_pinned()

    def memory(self, like: Tensor) -> Tensor:
        """Return a tensor with the shape, strides and dtype of ``like``, allocated on the training stream."""
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=self.device)

    def mark(self) -> Any:
        """Return the point up to which training has queued its work."""
        return torch.cuda.current_stream(self.device).record_event()

    def copy(self, target: Tensor, source: Tensor, *, after: Any, non_blocking: bool) -> Any:
        """Copy on the second stream after ``after``; return the point at which the copy is done."""
        self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=non_blocking)
        return self._stream.record_event()

    def join(self, copied: Any) -> None:
        """Let later work of training wait for a copy."""
        torch.cuda.current_stream(self.device).wait_event(copied)

    def wait(self, copied: Any) -> None:
        """Let the host wait for this copy only."""
        copied.synchronize()

    def give_up(self, target: Tensor) -> None:
        """Keep the memory of ``target`` allocated until the queued copies are done."""
        target.record_stream(self._stream)


def lane_for(device: torch.device) -> Lane | None:
    """Return a second stream of ``device``, or None for devices that need none, such as a CPU."""
    return Lane(device) if device.type == "cuda" else None


@dataclass(slots=True)
class CopyCounts:
    """How the tensors of batches were copied to the device.

    Args:
        ahead: Copied in the middle of the previous step.
        beside: Copied during the previous step, if the host was ahead of the device.
        plain: Copied in the order of training: tensors of a new shape, as in the first batch.
        unused: Copied ahead, and not used.
        unpinned: Of all these, tensors in memory that is not pinned.
    """

    ahead: int = 0
    beside: int = 0
    plain: int = 0
    unused: int = 0
    unpinned: int = 0


@dataclass(frozen=True, slots=True)
class _Started:
    place: int  # index among the tensors of the batch
    source: Tensor  # kept alive, so that its memory and id are not reused
    target: Tensor
    copied: Any


class CopiesAhead:
    """Copies batches to the device of ``lane``, each during the previous step.

    Args:
        lane: Where copies run.
        min_bytes: Smaller tensors are copied as usual.

    Attributes:
        counts: What was done so far.
    """

    def __init__(self, lane: Lane, *, min_bytes: int = MIN_BYTES) -> None:
        self.counts = CopyCounts()
        self._lane, self._min_bytes = lane, min_bytes
        self._free: dict[_Kind, list[Tensor]] = {}
        self._mark: Any = None  # after all work that may use the free memory
        self._started: dict[int, _Started] = {}
        self._unused: set[int] = set()  # indices of tensors that were copied ahead and not used
        self._asked: list[Tensor] = []  # on the device, in the current transfer

    def start(self, batch: Any) -> None:
        """Start to copy ``batch``, which is transferred next and must not change until then."""
        if self._started:
            return
        for place, source in enumerate(tensors_in(batch)):
            if place in self._unused or not self._suits(source) or not self._lane.is_pinned(source):
                continue
            if id(source) in self._started:  # it is in the batch twice; memory of a running copy must not be freed
                continue
            target, mark = self._taken(source) or (self._lane.memory(source), self._lane.mark())
            copied = self._lane.copy(target, source, after=mark, non_blocking=True)
            self._started[id(source)] = _Started(place, source, target, copied)

    @contextmanager
    def transfer(self) -> Iterator[None]:
        """Return prefetched copies for tensors that code in this context moves to the device."""
        try:
            with _Answers(self):
                yield
            self._foresee()
        except BaseException:
            self.forget()
            raise

    def forget(self) -> None:
        """Drop copies that were started for a batch that does not come."""
        for started in self._started.values():
            self._lane.give_up(started.target)
        self._started.clear()
        self._free.clear()
        self._asked.clear()
        self._mark = None

    def is_own(self, device: Any) -> bool:
        """Return whether ``device``, in any form, is the device of the lane."""
        own, other = self._lane.device, torch.device(device)
        if other.type == "cuda" and other.index is None:
            other = torch.device("cuda", torch.cuda.current_device())
        return own == other

    def answer(self, source: Tensor, *, non_blocking: bool) -> Tensor | None:
        """Return ``source`` on the device, or None if it must be copied as usual."""
        if not self._suits(source):
            return None
        self.counts.unpinned += not self._lane.is_pinned(source)
        if (started := self._started.pop(id(source), None)) is not None:
            target, copied = started.target, started.copied
            self.counts.ahead += 1
        elif (taken := self._taken(source)) is not None:
            target, mark = taken
            copied = self._lane.copy(target, source, after=mark, non_blocking=non_blocking)
            self.counts.beside += 1
        else:
            self.counts.plain += 1
            self._asked.append(source)
            return None
        self._lane.join(copied)
        if not non_blocking:
            self._lane.wait(copied)  # the caller may write to the source now
        self._asked.append(source)
        return target

    def _suits(self, source: Tensor) -> bool:
        return (
            type(source) is Tensor
            and source.device.type == "cpu"
            and source.layout is torch.strided
            and source.nbytes >= self._min_bytes
            and not (source.requires_grad or source.is_conj() or source.is_neg())
            and (
                source.is_contiguous()
                or (source.dim() == 4 and source.is_contiguous(memory_format=torch.channels_last))
            )
        )

    def _taken(self, source: Tensor) -> tuple[Tensor, Any] | None:
        free = self._free.get(_kind(source))
        return (free.pop(), self._mark) if free else None

    def _foresee(self) -> None:
        """Allocate memory for another batch like the last one."""
        for started in self._started.values():
            self._unused.add(started.place)
            self.counts.unused += 1
        asked = [*self._asked]
        self.forget()
        for source in asked:
            self._free.setdefault(_kind(source), []).append(self._lane.memory(source))
        if asked:
            self._mark = self._lane.mark()


class _Answers(TorchFunctionMode):
    """Intercepts calls that move a tensor and do nothing else, and asks `CopiesAhead` first."""

    def __init__(self, copies: CopiesAhead) -> None:
        super().__init__()
        self._copies = copies

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (Tensor.to, Tensor.cuda) and (asked := _asked(func, args, kwargs)) is not None:
            source, device, non_blocking = asked
            if self._copies.is_own(device):
                found = self._copies.answer(source, non_blocking=non_blocking)
                if found is not None:
                    return found
        return func(*args, **kwargs)


def _asked(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tensor, Any, bool] | None:
    """Return the tensor, device and ``non_blocking`` of a call that only moves a tensor; None for other calls."""
    if not args or len(args) > 2 or not kwargs.keys() <= {"device", "non_blocking"}:
        return None
    device = args[1] if len(args) == 2 else kwargs.get("device")
    if func is Tensor.cuda and device is None:
        device = "cuda"
    if not isinstance(device, (str, int, torch.device)) or isinstance(device, bool):
        return None
    return args[0], device, bool(kwargs.get("non_blocking"))


def _kind(tensor: Tensor) -> _Kind:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested mappings, lists, tuples and dataclasses of ``batch``, always in the same order.

    Other objects are not searched.
    """
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_in(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from tensors_in(value)
    elif is_dataclass(batch) and not isinstance(batch, type):
        for field in fields(batch):
            yield from tensors_in(getattr(batch, field.name, None))
