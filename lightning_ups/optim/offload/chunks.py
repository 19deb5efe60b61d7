"""What is stepped at a time: some parameters, or a part of one, with all their state."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_ups._compat.torch.tensors.tensors import local_of
from lightning_ups.optim.offload.memory import (
    Block,
    Copy,
    Form,
    Mark,
    Memory,
    Piece,
    aligned,
    form_of,
    pieces_of,
    plain_parts,
    rebuilt,
    runs_of,
    same_form,
)

PART = 1024  # elements: parts of a parameter begin at multiples of it
MASTER = ""  # the name that a master has among the state of its parameter


def is_large(value: Any) -> bool:
    """Return whether ``value``, from an optimizer's state, is worth moving: a tensor that is no single number."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return False
    return any(part.dim() and part.numel() for part in plain_parts(value))


def nbytes_of(value: Any) -> int:
    """Return the bytes that this rank keeps of a dense tensor of any class; 0 for anything else."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return 0
    return sum(part.nbytes for part in plain_parts(value))


class Options:
    """The options of parameter groups, which a step in chunks shall change as often as a step of all does."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._groups = optimizer.param_groups
        self._before = [self._of(group) for group in self._groups]
        self._after: dict[int, dict[str, Any]] = {}

    def _of(self, group: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in group.items() if name != "params"}

    @contextmanager
    def once(self, indices: Iterable[int]) -> Iterator[None]:
        """Step one chunk, of the groups ``indices``, with the options of before."""
        for group, before in zip(self._groups, self._before, strict=True):
            for name in group.keys() - before.keys() - {"params"}:
                del group[name]
            group.update(before)
        yield
        self._after.update({index: self._of(self._groups[index]) for index in set(indices)})

    def keep(self) -> None:
        """Let the groups have what their chunks made of them."""
        for index, after in self._after.items():
            self._groups[index].update(after)


class _Whole:
    """The state of a parameter that is stepped in parts."""

    def __init__(self, key: nn.Parameter) -> None:
        self._key = key
        self._blocks: dict[tuple[str, torch.dtype], Block] = {}

    def block(self, name: str, dtype: torch.dtype, memory: Memory, *, resident: bool) -> Block:
        if (name, dtype) not in self._blocks:
            nbytes = local_of(self._key).numel() * dtype.itemsize
            self._blocks[name, dtype] = Block(memory, aligned(nbytes), resident=resident)
        return self._blocks[name, dtype]

    def kept(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return all of one entry, like the parameter."""
        like = form_of(local_of(self._key))
        return rebuilt(self._key.detach(), iter([self._blocks[name, dtype].at(0, Form(dtype, like.size, like.stride))]))


@dataclass(eq=False, repr=False)
class Item:
    """One parameter that is stepped, or a part of it."""

    group: int
    parameter: nn.Parameter  # the module's
    key: nn.Parameter  # what the optimizer steps for it, and keeps state under: itself, or its master
    part: slice | None = None  # from which of its own elements to which; None for all of it
    whole: _Whole | None = None  # what the parts of one parameter share
    others: dict[str, Any] = field(default_factory=dict[str, Any])  # of its state, what is not moved
    names: list[str] = field(default_factory=list[str])  # of its state, in the order in which the optimizer has it

    @property
    def is_mastered(self) -> bool:
        """Whether a master is stepped for the parameter."""
        return self.key is not self.parameter

    def is_like(self, other: "Item") -> bool:
        """Return whether kernels that take lists take both: of one mesh, or both without one."""
        return _mesh(self) == _mesh(other)

    @property
    def is_last(self) -> bool:
        """Whether no other part of the parameter follows."""
        return self.part is None or self.part.stop == local_of(self.key).numel()

    def of(self, tensor: Tensor) -> Tensor:
        """Return what belongs to this item of ``tensor``, which is like the parameter."""
        if self.part is not None and tensor.layout is not torch.strided:
            raise RuntimeError(
                f"A parameter of shape {tuple(self.parameter.shape)} has a sparse gradient and state of several chunks."
                " It is stepped in parts, and a sparse gradient has none."
                " Use larger chunks (chunk_mb=...), or an embedding with sparse=False."
            )
        # Of a gradient with gaps a copy; of all else that is given here a view.
        return tensor if self.part is None else local_of(tensor).reshape(-1)[self.part]


@dataclass(eq=False, repr=False)
class _Entry:
    kept: Tensor
    pieces: list[Piece]

    def loaded(self, slot: Tensor) -> Tensor:
        return rebuilt(self.kept, iter([piece.loaded(slot) for piece in self.pieces]))


class Chunk:
    """Items that are stepped together, and where their state lies.

    Args:
        items: All of one mesh, or all without one.
        resident: Their state stays on the device.
    """

    def __init__(self, items: Sequence[Item], *, resident: bool) -> None:
        self.items, self.resident = items, resident
        self.nbytes = 0  # that it takes on the device while it is stepped
        self.stored: Mark = None
        self._entries: dict[Item, dict[str, _Entry]] = {item: {} for item in items}
        self._blocks: dict[Block, None] = {}

    @property
    def nbytes_kept(self) -> int:
        """The bytes of state that lie in its blocks."""
        return sum(piece.form.nbytes for piece in self._pieces())

    def _pieces(self) -> list[Piece]:
        return [piece for found in self._entries.values() for entry in found.values() for piece in entry.pieces]

    def place(self, values: Mapping[tuple[Item, str], Tensor], memory: Memory) -> None:
        """Find a place for each of ``values`` to lie between steps, and copy it there."""
        forms = [form_of(part) for value in values.values() for part in plain_parts(value)]
        if self.items[0].whole is not None:
            pieces = [
                self._piece_of_whole(item, name, form_of(value), memory) for (item, name), value in values.items()
            ]
        else:
            pieces = pieces_of(forms, memory, slot=self.nbytes, resident=self.resident)
            self.nbytes += sum(aligned(form.nbytes) for form in forms)
        self._blocks.update(dict.fromkeys(piece.block for piece in pieces))
        following = iter(pieces)
        for (item, name), value in values.items():
            parts = plain_parts(value)
            mine = [next(following) for _ in parts]
            for piece, part in zip(mine, parts, strict=True):
                piece.kept().copy_(part)
            self._entries[item][name] = _Entry(rebuilt(value, iter([piece.kept() for piece in mine])), mine)

    def _piece_of_whole(self, item: Item, name: str, form: Form, memory: Memory) -> Piece:
        assert item.whole is not None
        assert item.part is not None
        block = item.whole.block(name, form.dtype, memory, resident=self.resident)
        piece = Piece(block, item.part.start * form.dtype.itemsize, form, self.nbytes)
        self.nbytes += aligned(form.nbytes)
        return piece

    def forget(self, item: Item, name: str) -> None:
        """Give up the place of one entry, which the optimizer no longer has, or has in another form."""
        self._entries[item].pop(name, None)

    def clear(self) -> None:
        """Give up every place."""
        if self.items[0].whole is None:  # the parts of one parameter share theirs, and take it again
            self.release()
        for found in self._entries.values():
            found.clear()
        self._blocks.clear()
        self.nbytes = 0
        for item in self.items:
            item.others, item.names = {}, []

    def release(self) -> None:
        """Let what lies on the host lie in ordinary memory."""
        for block in self._blocks:
            block.release()

    def copies(self, slot: Tensor) -> list[Copy]:
        """Return what a load copies: to ``slot``, from where it lies."""
        pieces = sorted(self._pieces(), key=lambda piece: piece.slot)
        return [(slot[start : start + raw.nbytes], raw) for raw, start in runs_of(pieces)]

    def state(self, item: Item, slot: Tensor | None) -> dict[str, Any]:
        """Return the state of ``item``, its master among it, as it is in ``slot`` or, for None, where it lies."""
        found = self._entries[item].items()
        large = {name: entry.kept if slot is None else entry.loaded(slot) for name, entry in found}
        return {**large, **{n: large[n] if n in large else item.others[n] for n in item.names}}

    def kept(self, item: Item) -> dict[str, Any]:
        """Return the state between steps of the parameter that ``item`` is, or is a part of."""
        state = self.state(item, None)
        if item.whole is None:
            return state
        return {
            name: item.whole.kept(name, value.dtype) if name in self._entries[item] else value
            for name, value in state.items()
        }

    def take(self, item: Item, after: Mapping[str, Any], before: Mapping[str, Any]) -> dict[tuple[Item, str], Tensor]:
        """Take over the state ``after`` a step of ``item``; return what has no place yet.

        What the optimizer made anew, and did not write in place, is copied to where ``before`` lies.
        """
        fresh: dict[tuple[Item, str], Tensor] = {}
        for name in [name for name in self._entries[item] if name not in after]:
            self.forget(item, name)
        item.names = [name for name in after if name != MASTER]
        item.others = {}
        for name, value in after.items():
            if name != MASTER and not is_large(value):  # masters lie on the host however small they are
                self.forget(item, name)
                item.others[name] = value
            elif name not in self._entries[item] or not same_form(value, before[name]):
                self.forget(item, name)
                fresh[item, name] = value
            elif value is not before[name]:
                before[name].copy_(value)
        return fresh


def planned(
    items: Iterable[Item], *, nbytes: Mapping[Item, int], chunk_bytes: int, resident: Iterable[nn.Parameter]
) -> list[Chunk]:
    """Return chunks of ``items`` in their order, each of at most ``chunk_bytes`` where one item is not larger."""
    stay = set(resident)
    chunks: list[Chunk] = []
    run: list[Item] = []

    def alike(one: Item, other: Item) -> bool:
        # What is in parts is stepped alone: its parts are plain tensors, whatever the parameter is.
        whole = one.whole is None and other.whole is None
        return whole and one.is_like(other) and (one.parameter in stay) == (other.parameter in stay)

    for item in items:
        if run and (not alike(run[-1], item) or sum(nbytes[i] for i in run) + nbytes[item] > chunk_bytes):
            chunks.append(Chunk(run, resident=run[0].parameter in stay))
            run = []
        run.append(item)
    return [*chunks, *([Chunk(run, resident=run[0].parameter in stay)] if run else [])]


def _mesh(item: Item) -> Any:
    return item.parameter.device_mesh if isinstance(item.parameter, DTensor) else None


def regrouped(items: Iterable[Item], pairs: Iterable[tuple[int, nn.Parameter, nn.Parameter]]) -> set[nn.Parameter]:
    """Give ``items`` the groups that their parameters are in now; return their parameters."""
    group_of = {parameter: group for group, parameter, _ in pairs}
    known: set[nn.Parameter] = set()
    for item in items:
        item.group = group_of.get(item.parameter, item.group)
        known.add(item.parameter)
    return known


def in_parts(group: int, parameter: nn.Parameter, key: nn.Parameter, *, parts: int) -> list[Item]:
    """Return items that are ``parts`` parts of one parameter, or the one that is all of it."""
    local = local_of(key)
    size = -(-local.numel() // max(parts, 1))
    size = -(-size // PART) * PART
    if parts < 2 or size >= local.numel() or not (local.is_contiguous() and local_of(parameter).is_contiguous()):
        return [Item(group, parameter, key)]
    whole = _Whole(key)
    starts = range(0, local.numel(), size)
    return [Item(group, parameter, key, slice(s, min(s + size, local.numel())), whole) for s in starts]


@contextmanager
def stepping(
    optimizer: Optimizer, standing: Mapping[nn.Parameter, int], state: Mapping[nn.Parameter, Any]
) -> Iterator[None]:
    """Let a step of ``optimizer`` see the tensors ``standing`` alone, each in its group, with ``state``."""
    groups = optimizer.param_groups
    params = [group["params"] for group in groups]
    for index, group in enumerate(groups):
        group["params"] = [tensor for tensor, of in standing.items() if of == index]
    # Without those that are empty, which some optimizers do not expect.
    optimizer.param_groups = [group for group in groups if group["params"]]
    for tensor in standing:
        optimizer.state.pop(tensor, None)
        if state[tensor]:
            optimizer.state[tensor] = state[tensor]
    try:
        yield
    finally:
        optimizer.param_groups = groups
        for group, mine in zip(groups, params, strict=True):
            group["params"] = mine
