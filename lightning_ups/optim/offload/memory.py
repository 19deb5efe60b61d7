"""Where offloaded state is kept and used, the copies between the two, and tensors of any class as pieces of a block."""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_ups._compat.torch.tensors.pinned import pinned, unpin

ALIGNMENT = 512  # bytes; what kernels and copies like, and a whole number of elements of any type
Copy = tuple[Tensor, Tensor]  # to, from
Mark = Any  # a point in a queue of work that another queue can wait for; None: it has been passed


class Memory:
    """A device whose memory is the host's: copies are made when they are asked for.

    Work and copies are queues. A copy begins after the marks that it is given, and returns its own; work that reads
    what was copied waits for that.

    Attributes:
        moves: The class of the tensors that are moved; others stay where they are.
    """

    moves: type[Tensor] = Tensor

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def host(self, nbytes: int) -> Tensor:
        """Return ``nbytes`` of host memory that the device copies to at full speed."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def release(self, memory: Tensor) -> None:
        """Give up what `host` returned; tensors in it stay as they are."""

    def room(self, nbytes: int) -> Tensor:
        """Return ``nbytes`` on the device."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def load(self, copies: Iterable[Copy], *, after: Sequence[Mark] = ()) -> Mark:
        """Copy from the host to the device."""
        for to, source in copies:
            to.copy_(source)

    def store(self, copies: Iterable[Copy], *, after: Sequence[Mark] = ()) -> Mark:
        """Copy from the device to the host."""
        for to, source in copies:
            to.copy_(source)

    def mark(self) -> Mark:
        """Return the point that work on the device is queued up to."""

    def wait(self, mark: Mark) -> None:
        """Let the work that is queued from now on begin after ``mark``."""

    def reach(self, mark: Mark) -> None:
        """Let the host wait until ``mark`` is passed."""

    def settle(self) -> None:
        """Let the host wait until every copy is made."""


class StreamedMemory(Memory):
    """A GPU: one stream copies up, one copies down, both beside the work."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._up, self._down = torch.cuda.Stream(device), torch.cuda.Stream(device)

    @override
    def host(self, nbytes: int) -> Tensor:
        try:
            return pinned(nbytes)
        except RuntimeError as error:
            raise RuntimeError(
                f"{nbytes / 2**20:.0f} MiB of host memory could not be pinned for what is offloaded ({error})."
                " That is more than this machine has left, or than may be locked."
                " Leave more on the device, by OptimizerOffload(resident=...) or ActivationOffload(every_k=...), use a"
                " low-bit optimizer, or raise `ulimit -l`."
            ) from error

    @override
    def release(self, memory: Tensor) -> None:
        self.settle()
        unpin(memory)

    @override
    def load(self, copies: Iterable[Copy], *, after: Sequence[Mark] = ()) -> Mark:
        return self._copy(self._up, copies, after)

    @override
    def store(self, copies: Iterable[Copy], *, after: Sequence[Mark] = ()) -> Mark:
        return self._copy(self._down, copies, after)

    def _copy(self, stream: torch.cuda.Stream, copies: Iterable[Copy], after: Sequence[Mark]) -> Mark:
        for mark in after:
            if mark is not None:
                stream.wait_event(mark)
        with torch.cuda.stream(stream):
            for to, source in copies:
                to.copy_(source, non_blocking=True)
            return stream.record_event()

    @override
    def mark(self) -> Mark:
        return torch.cuda.current_stream(self.device).record_event()

    @override
    def wait(self, mark: Mark) -> None:
        if mark is not None:
            torch.cuda.current_stream(self.device).wait_event(mark)

    @override
    def reach(self, mark: Mark) -> None:
        if mark is not None:
            mark.synchronize()

    @override
    def settle(self) -> None:
        self._up.synchronize()
        self._down.synchronize()


def memory_of(device: torch.device) -> Memory:
    """Return the memory of ``device``: with streams where it has them."""
    return StreamedMemory(device) if device.type == "cuda" else Memory(device)


def plain_parts(tensor: Tensor) -> list[Tensor]:
    """Return the tensors without a class of their own that ``tensor`` is made of: a shard, or codes and scales."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    inner, _ = _taken_apart(tensor)
    return [part for value in inner.values() if isinstance(value, Tensor) for part in plain_parts(value)]


def rebuilt(tensor: Tensor, parts: Iterator[Tensor]) -> Tensor:
    """Return a tensor of the class of ``tensor``, made of as many of ``parts`` as that has."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return next(parts)
    inner, context = _taken_apart(tensor)
    # torch 2.13 names the mesh of a DTensor beside its local tensor: what is no tensor stays.
    new = {name: rebuilt(value, parts) if isinstance(value, Tensor) else value for name, value in inner.items()}
    return type(tensor).__tensor_unflatten__(new, context, tensor.shape, tensor.stride())  # type: ignore[attr-defined]


def _taken_apart(tensor: Any) -> tuple[dict[str, Any], Any]:
    names, context = tensor.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}, context


@dataclass(frozen=True, slots=True)
class Form:
    """How a plain tensor lies in memory."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The bytes that its elements take."""
        return prod(self.size) * self.dtype.itemsize


def form_of(tensor: Tensor) -> Form:
    """Return how ``tensor`` lies in memory, or would if it were packed."""
    size = tuple(tensor.shape)
    extent = sum(max(n - 1, 0) * step for n, step in zip(size, tensor.stride(), strict=True)) + 1
    dense = tensor.is_contiguous() or extent == tensor.numel()
    packed = tuple(prod(size[i + 1 :]) for i in range(len(size)))
    return Form(tensor.dtype, size, tuple(tensor.stride()) if dense else packed)


def same_form(one: Tensor, other: Tensor) -> bool:
    """Return whether both are of one class, and of the same plain tensors."""
    if type(one) is not type(other) or one.shape != other.shape:
        return False
    ones, others = plain_parts(one), plain_parts(other)
    return [(p.dtype, p.shape) for p in ones] == [(p.dtype, p.shape) for p in others]


class Block:
    """Memory that holds pieces: on the host, or, if ``resident``, on the device."""

    def __init__(self, memory: Memory, nbytes: int, *, resident: bool) -> None:
        self.raw = memory.room(nbytes) if resident else memory.host(nbytes)
        self.resident = resident
        # A finalizer keeps what it is given: the memory is released, which must be before it is freed.
        self._finalizer = None if resident else weakref.finalize(self, memory.release, self.raw)
        if self._finalizer is not None:
            self._finalizer.atexit = False

    def at(self, start: int, form: Form) -> Tensor:
        """Return the tensor of ``form`` that begins at ``start``."""
        if not form.nbytes:
            return view_of(self.raw, start, form)
        # Each with a storage of its own: whoever saves a view of one storage saves all of that, if it has one type.
        if self.resident:
            first = int(self.raw.storage_offset()) + start
            part: Any = self.raw.untyped_storage()[first : first + form.nbytes]
            return torch.empty(0, dtype=form.dtype, device=self.raw.device).set_(part, 0, form.size, form.stride)
        count = form.nbytes // form.dtype.itemsize
        flat = torch.frombuffer(self.raw.numpy(), dtype=form.dtype, count=count, offset=start)
        return flat.as_strided(form.size, form.stride)

    def release(self) -> None:
        """Let the memory be ordinary memory, whose tensors live as long as someone holds them."""
        if self._finalizer is not None:
            self._finalizer()


def view_of(raw: Tensor, start: int, form: Form) -> Tensor:
    """Return the tensor of ``form`` that begins at ``start`` of the bytes ``raw``."""
    offset = (raw.storage_offset() + start) // form.dtype.itemsize
    return raw[start : start + form.nbytes].view(form.dtype).as_strided(form.size, form.stride, offset)


@dataclass(frozen=True, slots=True)
class Piece:
    """A plain tensor in a block, and where a chunk has it on the device."""

    block: Block = field(repr=False)
    start: int
    form: Form
    slot: int

    def kept(self) -> Tensor:
        """Return it where it lies between steps."""
        return self.block.at(self.start, self.form)

    def loaded(self, slot: Tensor) -> Tensor:
        """Return it where it is during a step."""
        return view_of(slot, self.slot, self.form)


def aligned(nbytes: int) -> int:
    """Return ``nbytes``, rounded up to where the next piece may begin."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def pieces_of(forms: Sequence[Form], memory: Memory, *, slot: int, resident: bool) -> list[Piece]:
    """Return a piece of a new block for each of ``forms``, which on the device begin at ``slot``."""
    starts, end = [], 0
    for form in forms:
        starts.append(end)
        end += aligned(form.nbytes)
    block = Block(memory, end, resident=resident)
    return [Piece(block, start, form, slot + start) for start, form in zip(starts, forms, strict=True)]


def runs_of(pieces: Sequence[Piece]) -> Iterator[tuple[Tensor, int]]:
    """Yield the bytes of ``pieces`` between steps, and where they go on the device, in few copies."""
    first: Piece | None = None
    end = 0
    for piece in pieces:
        follows = first is not None and first.block is piece.block and end == piece.start
        if first is None or not follows or piece.slot - first.slot != piece.start - first.start:
            if first is not None:
                yield first.block.raw[first.start : end], first.slot
            first = piece
        end = piece.start + aligned(piece.form.nbytes)
    if first is not None:
        yield first.block.raw[first.start : end], first.slot
