"""Stepping on the device, with state that comes from the host and goes back, a chunk at a time."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ups._compat.torch.tensors.tensors import local_of
from lightning_ups.optim.adamw_step import OneKernel, Settings, one_kernel
from lightning_ups.optim.master_weights import taken_over
from lightning_ups.optim.offload.admission import Admission
from lightning_ups.optim.offload.chunks import (
    MASTER,
    Chunk,
    Item,
    Options,
    in_parts,
    is_large,
    planned,
    regrouped,
    stepping,
)
from lightning_ups.optim.offload.memory import Mark, Memory
from lightning_ups.optim.offload.source import Source

SLOTS = 3  # one is filled, one is stepped, one is emptied


class _Slot:
    """Room on the device for one chunk at a time."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.loaded: Mark = None
        self.free: Mark = None  # when what it held is stored


class StreamedSteps:
    """Steps chunk after chunk: while one is stepped, the next is loaded and the one before is stored.

    Attributes:
        allows_one_kernel: AdamW's step may be made for it, as `adamw_step` does. True where there are masters, whose
            step would be made so without offloading.
    """

    def __init__(
        self,
        inner: Optimizer,
        source: Source,
        *,
        memory: Memory,
        chunk_bytes: int,
        admission: Admission,
        resident: float,
    ) -> None:
        self._inner, self._source, self.memory = inner, source, memory
        self._chunk_bytes, self._admission, self._share = chunk_bytes, admission, resident
        self._slots: list[_Slot] = []
        self._begin: Mark = None
        self._kernels: dict[Chunk, OneKernel] = {}  # each keeps its tables: a chunk's addresses seldom change
        self.allows_one_kernel = any(key is not p for _, p, key in source.pairs())
        self.chunks: list[Chunk] = []
        self.plan()

    @property
    def device_bytes(self) -> int:
        """The bytes of state, and of room for it, that are on the device."""
        return sum(slot.memory.nbytes for slot in self._slots) + sum(c.nbytes_kept for c in self.chunks if c.resident)

    @property
    def host_bytes(self) -> int:
        """The bytes of state that are on the host."""
        return sum(chunk.nbytes_kept for chunk in self.chunks if not chunk.resident)

    def plan(self) -> None:
        """Give a chunk to each parameter that has none, and let its state lie where it shall."""
        pairs = [*self._source.pairs()]
        known = regrouped((item for chunk in self.chunks for item in chunk.items), pairs)
        new = [(group, p, key) for group, p, key in pairs if p not in known]
        sizes = {p: int(self._size(key) * (self._admission.state_bytes + (key is not p))) for _, p, key in new}
        items: list[Item] = []
        nbytes: dict[Item, int] = {}
        for group, p, key in new:
            found = in_parts(group, p, key, parts=-(-sizes[p] // self._chunk_bytes) if self._admission.parted else 1)
            items += found
            nbytes.update(dict.fromkeys(found, sizes[p] // len(found)))
        chunks = planned(items, nbytes=nbytes, chunk_bytes=self._chunk_bytes, resident=self._staying(sizes))
        self.chunks += chunks
        for chunk in chunks:
            self._settle_in(chunk)

    def _size(self, key: Tensor) -> int:
        # As large on every rank, so that all make the same chunks, and a step that communicates does so in one order.
        world = getattr(key, "device_mesh", None)
        return key.numel() * key.dtype.itemsize // (1 if world is None else world.size())

    def _staying(self, sizes: Mapping[nn.Parameter, int]) -> list[nn.Parameter]:
        total, taken, stay = sum(sizes.values()), 0, []
        for parameter, size in sizes.items():
            if taken + size <= self._share * total:
                stay.append(parameter)
                taken += size
        return stay

    def _settle_in(self, chunk: Chunk) -> None:
        values: dict[tuple[Item, str], Tensor] = {}
        for item in chunk.items:
            state = self._inner.state.get(item.key, {})
            item.names = [*state]
            for name, value in state.items():
                if is_large(value):
                    values[item, name] = item.of(value)
                else:
                    item.others[name] = value.clone() if item.whole is not None and isinstance(value, Tensor) else value
            if item.is_mastered:
                values[item, MASTER] = item.of(item.key.detach())
        if values:
            chunk.place(values, self.memory)
        if chunk.items[-1].is_last:  # until then the parts to come are read from what the optimizer has
            for item in chunk.items:
                self._keep(chunk, item)

    def adopt(self) -> None:
        """Take over the state that the optimizer has now, in the place of what it had."""
        self.memory.settle()
        for chunk in self.chunks:
            chunk.clear()
            self._settle_in(chunk)

    def _keep(self, chunk: Chunk, item: Item) -> None:
        kept = chunk.kept(item)
        if MASTER in kept:
            item.key.data = kept.pop(MASTER)
        if kept:
            self._inner.state[item.key] = kept

    def step(self, wanted: Collection[nn.Parameter], *, coefficient: Tensor | None) -> None:
        """Step those of ``wanted`` that have gradients, which ``coefficient`` multiplies."""
        due = [chunk for chunk in self.chunks if any(self._is_due(item, wanted) for item in chunk.items)]
        streamed = [chunk for chunk in due if not chunk.resident and chunk.nbytes]
        self._make_room(max((chunk.nbytes for chunk in streamed), default=0), count=min(SLOTS, len(streamed)))
        options, settings = Options(self._inner), self._one_kernel()
        self._take_over_numbers(due)
        self._source.writes.begin()
        ahead = iter(streamed)
        slots: dict[Chunk, _Slot] = {}
        self._load(ahead, slots, count=max(len(self._slots) - 1, 1))
        for chunk in due:
            slot = slots.get(chunk)
            if slot is not None:
                self.memory.wait(slot.loaded)
            with options.once(item.group for item in chunk.items):
                self._step_chunk(chunk, None if slot is None else slot.memory, wanted, coefficient, settings)
            if slot is not None:
                slot.free = chunk.stored
                self._load(ahead, slots, count=1)
        options.keep()
        self._source.writes.end()
        stepped = [item for chunk in due for item in chunk.items if self._is_due(item, wanted)]
        self._source.writes.note(item.parameter for item in stepped if item.is_mastered)
        self._source.spent(item.parameter for item in stepped)

    def _take_over_numbers(self, chunks: Collection[Chunk]) -> None:
        # Of a parameter in parts one number is shown, the last part's, and what is written there is for all.
        for item in (item for chunk in chunks for item in chunk.items if item.whole is not None):
            shown = self._inner.state.get(item.key, {})
            for name, value in item.others.items():
                if isinstance(value, Tensor) and shown.get(name, value) is not value:
                    value.copy_(shown[name])

    @property
    def in_one_kernel(self) -> bool:
        """Whether the step of a chunk is one pass over it: `adamw_step.settings_of` says when."""
        return self._one_kernel() is not None

    def _one_kernel(self) -> list[Settings] | None:
        if not self.allows_one_kernel:
            return None
        settings = one_kernel(self._inner, device=self.memory.device)
        copied = (p for _, p, key in self._source.pairs() if key is not p)
        return settings if settings is not None and all(p.is_contiguous() for p in copied) else None

    def _is_due(self, item: Item, wanted: Collection[nn.Parameter]) -> bool:
        return item.parameter in wanted and self._source.gradient(item.parameter) is not None

    def _make_room(self, nbytes: int, *, count: int) -> None:
        if len(self._slots) < count or any(slot.memory.nbytes < nbytes for slot in self._slots):
            self.memory.settle()
            self._slots.clear()
            self._slots += [_Slot(self.memory.room(nbytes)) for _ in range(count)]
        self._begin = self.memory.mark()  # up to here, other work may have had the memory of a slot

    def _load(self, chunks: Iterator[Chunk], slots: dict[Chunk, _Slot], *, count: int) -> None:
        for chunk in islice(chunks, count):
            slot = self._slots[len(slots) % len(self._slots)]
            slots[chunk] = slot
            slot.loaded = self.memory.load(chunk.copies(slot.memory), after=[self._begin, slot.free, chunk.stored])

    def _step_chunk(
        self,
        chunk: Chunk,
        slot: Tensor | None,
        wanted: Collection[nn.Parameter],
        coefficient: Tensor | None,
        settings: Sequence[Settings] | None,
    ) -> None:
        before = {item: chunk.state(item, slot) for item in chunk.items}
        standing = {item: self._stand_in(item, before[item]) for item in chunk.items if self._is_due(item, wanted)}
        groups = {tensor: item.group for item, tensor in standing.items()}
        if self._source.stood is not None:
            self._source.stood += standing.values()
        states = {t: {n: v for n, v in before[item].items() if n != MASTER} for item, t in standing.items()}
        with stepping(self._inner, groups, states):
            if settings is None:
                self._give_gradients(standing, coefficient)
                self._inner.step()
                self._write_copies(standing)
            else:
                used = [settings[group] for group in sorted({*groups.values()})]
                self._step_in_one_kernel(chunk, standing, coefficient, used)
        fresh: dict[tuple[Item, str], Tensor] = {}
        for item, tensor in standing.items():
            after = {MASTER: before[item][MASTER]} if MASTER in before[item] else {}
            after.update(self._inner.state.pop(tensor, {}))
            fresh.update(chunk.take(item, after, before[item]))
        if slot is not None:
            back = [(kept, loaded) for loaded, kept in chunk.copies(slot)]
            chunk.stored = self.memory.store(back, after=[self.memory.mark()])
        if fresh:
            chunk.place(fresh, self.memory)
        for item in standing:
            self._keep(chunk, item)

    def _stand_in(self, item: Item, state: Mapping[str, Any]) -> nn.Parameter:
        if item.is_mastered:
            master = state[MASTER]
            if self._source.writes.possible(item.parameter):
                low = item.of(item.parameter.detach())
                self._source.writes.found(item.parameter, taken_over(master, low))
            return nn.Parameter(master)
        if item.part is None and self._source.stood is None:
            return item.parameter
        return nn.Parameter(item.of(item.parameter.detach()))

    def _give_gradients(self, standing: Mapping[Item, nn.Parameter], coefficient: Tensor | None) -> None:
        given = []
        for item, tensor in standing.items():
            gradient = self._source.gradient(item.parameter)
            assert gradient is not None
            tensor.grad = item.of(gradient).to(tensor.dtype)
            given.append(local_of(tensor.grad))
        if coefficient is not None and given:
            torch._foreach_mul_(given, coefficient)

    def _write_copies(self, standing: Mapping[Item, nn.Parameter]) -> None:
        for item, tensor in standing.items():
            if item.is_mastered:
                item.of(item.parameter).copy_(tensor.detach())

    def _step_in_one_kernel(
        self,
        chunk: Chunk,
        standing: Mapping[Item, nn.Parameter],
        coefficient: Tensor | None,
        settings: Sequence[Settings],
    ) -> None:
        items = {id(tensor): item for item, tensor in standing.items()}

        def gradient(weight: Tensor) -> Tensor | None:
            item = items[id(weight)]
            found = self._source.gradient(item.parameter)
            return None if found is None else item.of(found)

        def copy(weight: Tensor) -> Tensor | None:
            item = items[id(weight)]
            return item.of(item.parameter) if item.is_mastered else None

        self._kernels.setdefault(chunk, OneKernel(self._inner)).step(
            self._inner,
            settings,
            coefficient=coefficient,
            gradients=lambda weights: [*map(gradient, weights)],
            copies=lambda weights: [*map(copy, weights)],
        )

    def settle(self) -> None:
        """Let the host wait until all state lies where it is kept."""
        self.memory.settle()

    def close(self) -> None:
        """Give up the room on the device; the state stays where it is, as ordinary tensors."""
        self.memory.settle()
        self._slots.clear()
        for chunk in self.chunks:
            chunk.release()
