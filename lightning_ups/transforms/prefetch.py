"""Copying batches to the device beside the work of the step before.

Note [Whose memory]. A copy that runs beside training must write where no work that is queued still reads or writes.
torch's allocator gives memory out again in the order of the stream that asked for it. Memory that a second stream asked
for would come back only when the host sees that training is done with it (``record_stream``), and a host that is many
steps ahead would ask for more with each. So memory is asked for in the order of training, one step early, and a mark is
set: all work that may use it still lies before the mark. The second stream waits for the mark and copies; training's
stream waits for the copy. From then on the tensor is like any other, and one batch more is on the device than without.
Only what is given up before training waited for its copy is recorded for the second stream.

Note [Nothing moves]. Hooks and loaders keep their places. What the transfer of a batch asks of a tensor, to be on the
device, is answered by a copy on the second stream: it begins at once where it is asked for, while the device is still
at the step before if the host is ahead; or it was begun in the midst of that step (`CopiesAhead.start`), where the
batch was known by then.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

__all__ = ["MIN_BYTES", "CopiesAhead", "CopyCounts", "CudaLane", "Lane", "lane_for", "tensors_in"]

MIN_BYTES = 2**16  # a smaller copy takes less than what hides it
_Kind = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


class Lane(Protocol):
    """A second stream of a device, on which copies run beside the work of training."""

    device: torch.device

    def is_pinned(self, source: Tensor) -> bool:
        """Return whether the device can read ``source`` of the host without this process."""
        ...

    def memory(self, like: Tensor) -> Tensor:
        """Return a tensor on the device of the shape, strides and type of ``like``, in the order of training."""
        ...

    def mark(self) -> Any:
        """Return the point that training has queued its work up to."""
        ...

    def copy(self, target: Tensor, source: Tensor, *, after: Any, non_blocking: bool) -> Any:
        """Copy when ``after`` is passed, beside training; return the point at which the copy is made."""
        ...

    def join(self, copied: Any) -> None:
        """Let the work that training queues from now on wait for a copy."""

    def wait(self, copied: Any) -> None:
        """Let the host wait for a copy."""

    def give_up(self, target: Tensor) -> None:
        """Keep the memory of ``target`` from others until the copies that are queued are made."""


class CudaLane:
    """A second stream of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self._stream = torch.cuda.Stream(self.device)

    def is_pinned(self, source: Tensor) -> bool:
        """Return whether ``source`` is in pinned memory."""
        return source.is_pinned()

    def memory(self, like: Tensor) -> Tensor:
        """Return memory of training's stream."""
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=self.device)

    def mark(self) -> Any:
        """Return an event on training's stream."""
        return torch.cuda.current_stream(self.device).record_event()

    def copy(self, target: Tensor, source: Tensor, *, after: Any, non_blocking: bool) -> Any:
        """Copy on the second stream."""
        self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=non_blocking)
        return self._stream.record_event()

    def join(self, copied: Any) -> None:
        """Let training's stream wait."""
        torch.cuda.current_stream(self.device).wait_event(copied)

    def wait(self, copied: Any) -> None:
        """Let the host wait, for this copy alone."""
        copied.synchronize()

    def give_up(self, target: Tensor) -> None:
        """Record the second stream as one that uses the memory."""
        target.record_stream(self._stream)


def lane_for(device: torch.device) -> Lane | None:
    """Return a second stream of ``device``, or None if it needs none: a CPU reads batches where they are."""
    return CudaLane(device) if device.type == "cuda" else None


@dataclass(slots=True)
class CopyCounts:
    """How the tensors of batches came to the device.

    Args:
        ahead: Copied in the midst of the step before.
        beside: Copied beside it as far as the host was ahead of the device.
        plain: Copied in the order of training: of a shape that was not foreseen, as in the first batch.
        in_vain: Copied ahead, and not asked for.
        unpinned: Of all of these, those in memory that is not pinned.
    """

    ahead: int = 0
    beside: int = 0
    plain: int = 0
    in_vain: int = 0
    unpinned: int = 0


@dataclass(frozen=True, slots=True)
class _Started:
    place: int  # among the tensors of the batch
    source: Tensor  # kept, so that its memory and its id stay its own
    target: Tensor
    copied: Any


class CopiesAhead:
    """Copies batches to the device of ``lane``, each beside the work of the step before.

    Args:
        lane: Where copies run.
        min_bytes: Smaller tensors are copied as ever.

    Attributes:
        counts: What was done so far.
    """

    def __init__(self, lane: Lane, *, min_bytes: int = MIN_BYTES) -> None:
        self.counts = CopyCounts()
        self._lane, self._min_bytes = lane, min_bytes
        self._free: dict[_Kind, list[Tensor]] = {}
        self._mark: Any = None  # behind all work that may use what is free
        self._started: dict[int, _Started] = {}
        self._in_vain: set[int] = set()  # places whose tensors were copied ahead and not asked for
        self._asked: list[Tensor] = []  # on the device, in the transfer that goes on

    def start(self, batch: Any) -> None:
        """Begin to copy ``batch``, which is transferred next and stays as it is until then; not if it has begun."""
        if self._started:
            return
        for place, source in enumerate(tensors_in(batch)):
            if place in self._in_vain or not self._suits(source) or not self._lane.is_pinned(source):
                continue
            if id(source) in self._started:  # it is in the batch twice; memory being written to may not be let go
                continue
            target, mark = self._taken(source) or (self._lane.memory(source), self._lane.mark())
            copied = self._lane.copy(target, source, after=mark, non_blocking=True)
            self._started[id(source)] = _Started(place, source, target, copied)

    @contextmanager
    def transfer(self) -> Iterator[None]:
        """Answer what code within this context asks of tensors of the host: to be on the device."""
        try:
            with _Answers(self):
                yield
            self._foresee()
        except BaseException:
            self.forget()
            raise

    def forget(self) -> None:
        """Give up what was begun or kept for a batch that does not come."""
        for started in self._started.values():
            self._lane.give_up(started.target)
        self._started.clear()
        self._free.clear()
        self._asked.clear()
        self._mark = None

    def is_own(self, device: Any) -> bool:
        """Return whether ``device``, in any spelling, is that of the lane."""
        own, other = self._lane.device, torch.device(device)
        if other.type == "cuda" and other.index is None:
            other = torch.device("cuda", torch.cuda.current_device())
        return own == other

    def answer(self, source: Tensor, *, non_blocking: bool) -> Tensor | None:
        """Return ``source`` on the device, or None if it is to be copied as ever."""
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
            self._lane.wait(copied)  # whoever asked may write to the source now
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
        """Ask for memory for a batch like the one that was transferred."""
        for started in self._started.values():
            self._in_vain.add(started.place)
            self.counts.in_vain += 1
        asked = [*self._asked]
        self.forget()
        for source in asked:
            self._free.setdefault(_kind(source), []).append(self._lane.memory(source))
        if asked:
            self._mark = self._lane.mark()


class _Answers(TorchFunctionMode):
    """Asks `CopiesAhead` first where a tensor is moved and not otherwise changed."""

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
    """Return the tensor, the device and ``non_blocking`` of a call that does nothing but move; None of any other."""
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
    """Yield the tensors in ``batch``: in mappings, lists, tuples and dataclasses, one in another, always in one order.

    What another object holds is not looked at.
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
