"""Offloads tensors saved for backward to the host, and loads them before they are needed."""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ups._compat.torch.tensors.autograd import dense_parts, differentiated_by_torch_func, has_values
from lightning_ups.optim.offload import Form, Mark, Memory, form_of, memory_of, plain_parts, view_of
from lightning_ups.transforms.error_hints import explaining_torch_func
from lightning_ups.transforms.forward import Forward, replaced_forward

MIN_BYTES = 2**20  # of a saved tensor: a smaller copy takes as long
COMPARED_BYTES = 64 * 2**20  # at once, when a copy is compared with its source
SPREAD = 4  # a non-contiguous tensor is moved with its whole storage if that is at most this many times larger
# Of a parameter. Identifies casts and views of it, for which autograd has no other name.
_RESHAPING = {"TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0", "ToCopyBackward0"}


@dataclass
class Offloaded:
    """What was moved. The counts grow as blocks run.

    Args:
        ran: Blocks that ran with gradients.
        moved_bytes: Bytes copied to the host, each storage once.
        left_bytes: Bytes saved on the device: small tensors, tensor subclasses, and tensors with a conjugate or
            negative bit.
        late: Number of tensors that were needed before their load began.
    """

    ran: set[nn.Module] = field(default_factory=set)
    moved_bytes: int = 0
    left_bytes: int = 0
    late: int = 0


class _Pool:
    """Pinned host memory that is reused, since pinning takes far longer than copying."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._free: list[tuple[Tensor, Mark]] = []
        self._all: list[Tensor] = []

    def take(self, nbytes: int) -> tuple[Tensor, Mark]:
        """Return host memory of at least ``nbytes``, and the mark after which it may be written."""
        fitting = [pair for pair in self._free if nbytes <= pair[0].nbytes <= 2 * nbytes]
        if fitting:
            best = min(fitting, key=lambda pair: pair[0].nbytes)
            self._free = [pair for pair in self._free if pair[0] is not best[0]]
            return best
        memory = self._memory.host(nbytes)
        self._all.append(memory)
        return memory, None

    def give_back(self, memory: Tensor, mark: Mark) -> None:
        self._free.append((memory, mark))

    def close(self) -> None:
        for memory in self._all:
            self._memory.release(memory)
        self._all.clear()
        self._free.clear()


class _Range:
    """A range of bytes in a storage: on its way to the host, there, or back on the device."""

    def __init__(self, source: Tensor, memory: Memory, pool: _Pool) -> None:
        self._memory, self.nbytes = memory, source.nbytes
        self._version, self._written = source._version, False
        self._kept: Tensor | None = None
        self.source: Tensor | None = source  # until it is on the host; until then its memory must not be reused
        self._host, free = pool.take(source.nbytes)
        self.stored = memory.store([(self._host[: source.nbytes], source)], after=[memory.mark(), free])
        self._state = {"mark": self.stored}
        self.device: Tensor | None = None
        self._loaded: Mark = None
        weakref.finalize(self, _give_back, memory, pool, self._host, self._state).atexit = False

    def let_go(self, *, keep: bool = False, check: bool = False) -> None:
        """Release the device memory to later work, or keep it because it is needed next.

        Args:
            keep: Whether it also stays on the device.
            check: Whether to compare the copy with it, which synchronizes.

        Raises:
            RuntimeError: If they differ, although no write to it was recorded.
        """
        self._memory.wait(self.stored)
        self._written = self.written  # the copy may have been made after that
        if check and not self._written and has_values(self._host) and not self._is_copied():
            raise RuntimeError(_filled_late(self.nbytes))
        if keep and self.device is None:
            self.device = self._kept = self.source
        self.source = None

    def _is_copied(self) -> bool:
        assert self.source is not None
        host = self._host[: self.nbytes]
        pairs = zip(host.split(COMPARED_BYTES), self.source.split(COMPARED_BYTES), strict=True)
        return all(torch.equal(one.to(other.device), other) for one, other in pairs)

    @property
    def written(self) -> bool:
        """Whether it was written to since it was saved."""
        here = self._kept if self.source is None else self.source
        return self._written or (here is not None and here._version != self._version)

    def load(self) -> None:
        """Begin to load it to the device."""
        if self.device is None:
            # Allocated on the current stream, to which it is returned.
            self.device = self._memory.room(self.nbytes)
            after = [self._memory.mark(), self.stored]
            copies = [(self.device, self._host[: self.nbytes])]
            self._loaded = self._state["mark"] = self._memory.load(copies, after=after)
            self._state["unused"] = self._loaded

    def back(self) -> Tensor:
        """Return it on the device."""
        self.load()
        assert self.device is not None
        self._memory.wait(self._loaded)
        self._state.pop("unused", None)
        return self.device


def _give_back(memory: Memory, pool: _Pool, host: Tensor, state: dict[str, Mark]) -> None:
    if "unused" in state:
        memory.wait(state["unused"])  # the device memory is free after this, and must not be written to any more
    pool.give_back(host, state["mark"])


@dataclass(frozen=True, eq=False)
class _Handle:
    """What autograd holds in place of a saved tensor."""

    range: _Range
    start: int
    form: Form
    run: "_Run"


_Key = tuple[int, int, int, int]  # storage, offset, number of bytes, and version counter


class _Run:
    """One forward of one block."""

    def __init__(self, before: "_Run | None") -> None:
        self.before = None if before is None else weakref.ref(before)  # the next in backward
        self.is_first = False  # whether it is the first run of its block that holds anything
        self.ranges: dict[_Key, weakref.ref[_Range]] = {}
        self.held: list[_Range] = []  # whose sources must stay alive
        self.prefetched = False

    def find(self, key: _Key) -> _Range | None:
        """Return the range of these bytes, unless it may belong to an earlier tensor at this address."""
        found = self.ranges[key]() if key in self.ranges else None
        return found if found is not None and found.source is not None else None

    def prefetch(self) -> None:
        """Begin to load everything that is still needed."""
        if not self.prefetched:
            self.prefetched = True
            for reference in reversed(self.ranges.values()):
                if (found := reference()) is not None:
                    found.load()


class _Mover:
    """Packs and unpacks the saved tensors of all blocks."""

    def __init__(self, memory: Memory, *, min_bytes: int) -> None:
        self._memory, self._min_bytes = memory, min_bytes
        self.pool = _Pool(memory)
        self.done = Offloaded()
        self._last: _Run | None = None
        self._own: set[int] = set()  # storages of parameters and buffers
        self._compared: set[nn.Module] = set()  # blocks whose copies were compared

    @contextmanager
    def running(self, block: nn.Module) -> Iterator[None]:
        """Offload what a forward of ``block`` saves."""
        own, run = self._own, _Run(self._last)
        self._own = own | _storages(block)
        self.done.ran.add(block)
        try:
            with torch.autograd.graph.saved_tensors_hooks(partial(self._pack, run), self._unpack):
                yield
        finally:
            self._own = own
            if run.held and block not in self._compared:
                self._compared.add(block)
                run.is_first = True
            self._follow(run)

    def _follow(self, run: _Run) -> None:
        # The copies of the previous block have overlapped with this one: later work may use their memory.
        self.finish(keep=False)
        self._last = run if run.held else None

    def finish(self, *, keep: bool = True) -> None:
        """Release the last block's tensors; or keep those still on the device, because its backward begins."""
        last, self._last = self._last, None
        if last is not None:
            try:
                for held in last.held:
                    held.let_go(keep=keep, check=last.is_first)
            finally:
                last.held.clear()

    def close(self) -> None:
        """Free the memory."""
        self.finish(keep=False)
        self.pool.close()

    def _pack(self, run: _Run, tensor: Tensor) -> Any:
        if not self._moves(tensor):
            return tensor
        form = form_of(tensor)
        dense = form.stride == tuple(tensor.stride())
        first = int(tensor.storage_offset()) * tensor.element_size()
        start = first if dense else 0
        nbytes = form.nbytes if dense else tensor.untyped_storage().nbytes()
        if nbytes > SPREAD * form.nbytes or start % form.dtype.itemsize:
            self.done.left_bytes += form.nbytes
            return tensor
        found = self._range(run, tensor, start, nbytes - nbytes % form.dtype.itemsize)
        return _Handle(found, 0 if dense else first, Form(form.dtype, form.size, tuple(tensor.stride())), run)

    def _range(self, run: _Run, tensor: Tensor, start: int, nbytes: int) -> _Range:
        key = (_storage(tensor), start, nbytes, tensor._version)
        for earlier in (run, self._last):
            if earlier is not None and (found := earlier.find(key)) is not None:
                return found
        size = tensor.element_size()
        raw = tensor.detach().as_strided((nbytes // size,), (1,), start // size).view(torch.uint8)
        made = _Range(raw, self._memory, self.pool)
        run.ranges[key] = weakref.ref(made)
        run.held.append(made)
        self.done.moved_bytes += nbytes
        return made

    def _moves(self, tensor: Tensor) -> bool:
        if (
            type(tensor) is not self._memory.moves
            or tensor.device.type != self._memory.device.type
            or tensor.layout != torch.strided
            or tensor.is_conj()  # their bytes are not their values
            or tensor.is_neg()
        ):
            if isinstance(tensor, Tensor) and not isinstance(tensor, nn.Parameter):
                self.done.left_bytes += sum(part.numel() * part.element_size() for part in dense_parts(tensor))
            return False
        if _storage(tensor) in self._own or _is_parameter(tensor):
            return False
        if tensor.numel() * tensor.element_size() < self._min_bytes:
            self.done.left_bytes += tensor.numel() * tensor.element_size()
            return False
        return True

    def _unpack(self, handle: Any) -> Tensor:
        if not isinstance(handle, _Handle):
            return handle
        self.finish()
        if handle.range.written:
            raise RuntimeError(_written_to(handle.form))
        if handle.range.device is None and handle.run.prefetched:
            self.done.late += 1
        handle.run.prefetch()
        raw = handle.range.back()
        if handle.run.before is not None and (before := handle.run.before()) is not None:
            before.prefetch()
        return view_of(raw, handle.start, handle.form)


def _written_to(form: Form) -> str:
    return (
        f"A tensor of shape {[*form.size]} and dtype {str(form.dtype).removeprefix('torch.')} was written to after a"
        " block had saved it for backward."
        " ActivationOffload may have copied it before or after the write, so gradients would be wrong."
        " Write `x = x + y` instead of `x += y`, in the block or on its output."
    )


def _filled_late(nbytes: int) -> str:
    return (
        f"A tensor of {nbytes} bytes was written to after a block had saved it for backward, by a kernel whose writes"
        " torch does not count, as RReLU with its noise."
        " ActivationOffload had copied it before, so gradients would be wrong."
        " Use another operator, leave that block out with ActivationOffload(blocks=[...]), or recompute it with"
        " ActivationCheckpoint(save='nothing')."
    )


def _storages(module: nn.Module) -> set[int]:
    tensors = (part for t in (*module.parameters(), *module.buffers()) for part in plain_parts(t.detach()))
    return {_storage(part) for tensor in tensors for part in dense_parts(tensor)}


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # not the data pointer: fake tensors have none


def _is_parameter(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is a parameter that was only reshaped or cast, as by autocast."""
    node = tensor.grad_fn
    while node is not None and type(node).__name__ in _RESHAPING:
        node = node.next_functions[0][0]
    return (
        node is not None
        and type(node).__name__ == "AccumulateGrad"
        and isinstance(getattr(node, "variable", None), nn.Parameter)
    )


@contextmanager
def offload_activations(
    blocks: Iterable[nn.Module], *, memory: Memory | None = None, min_bytes: int = MIN_BYTES, device: torch.device | str
) -> Iterator[Offloaded]:
    """Offload to the host what ``blocks`` save for backward while the context is open.

    Parameters, and views and casts of them, are not moved. Each storage is copied once. The backward of a block loads
    what the block before it saved, while it computes. Values do not change, bit for bit. The first tensors that a block
    saves are compared with their copies.

    Args:
        blocks: The blocks, compiled or recomputed or neither.
        memory: Where the tensors are and go. None: the default of ``device``.
        min_bytes: Smaller tensors are not moved.
        device: Where the blocks run.

    Yields:
        What was moved; the counts grow as the blocks run.
    """
    mover = _Mover(memory_of(torch.device(device)) if memory is None else memory, min_bytes=min_bytes)
    with ExitStack() as undo:
        undo.callback(mover.close)
        for block in dict.fromkeys(blocks):
            undo.enter_context(replaced_forward(block, partial(_moving, mover=mover)))
        yield mover.done


def _moving(inner: Forward, *, mover: _Mover) -> Forward:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # A block that is part of a larger graph saves nothing itself, and does not count as having run.
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return inner(self, *args, **kwargs)
        if differentiated_by_torch_func():
            raise RuntimeError(
                f"torch.func (grad, jvp, jacrev ...) differentiates {type(self).__name__}, whose activations should be"
                " offloaded."
                " torch.func does not support saved-tensor hooks."
                " Name other blocks in ActivationOffload(blocks=[...]), or compute derivatives with"
                " torch.autograd.grad(..., create_graph=True)."
            )
        with mover.running(self), explaining_torch_func(self, part="ActivationOffload"):
            return inner(self, *args, **kwargs)

    return forward
