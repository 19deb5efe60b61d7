"""Stepping on the CPU: gradients come down, parameters go up, and state never moves."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ups._compat.torch.tensors.tensors import local_of
from lightning_ups.optim.master_weights import taken_over
from lightning_ups.optim.offload.chunks import Item, Options, nbytes_of, regrouped, stepping
from lightning_ups.optim.offload.memory import Block, Copy, Mark, Memory, aligned, form_of, plain_parts, rebuilt
from lightning_ups.optim.offload.source import Source

SLOTS = 2  # one is filled while the other is stepped


class _Slot:
    """Room on the host for what one chunk at a time brings down and sends up."""

    def __init__(self, memory: Memory, nbytes: int) -> None:
        self.block, self._end = Block(memory, nbytes, resident=False), 0
        self.gradients: dict[Item, Tensor] = {}
        self.parameters: dict[Item, Tensor] = {}
        self.down: Mark = None
        self.up: Mark = None

    def empty(self) -> None:
        """Begin anew."""
        self._end = 0
        self.gradients, self.parameters = {}, {}

    def like(self, tensor: Tensor) -> Tensor:
        """Return room for what ``tensor`` holds, of its class."""
        parts = []
        for form in map(form_of, plain_parts(tensor)):
            parts.append(self.block.at(self._end, form))
            self._end += aligned(form.nbytes)
        return rebuilt(tensor, iter(parts))


class HostSteps:
    """Steps on the CPU, chunk after chunk: while one is stepped, gradients of the next come down."""

    def __init__(self, inner: Optimizer, source: Source, *, memory: Memory, chunk_bytes: int) -> None:
        self._inner, self._source, self.memory, self._chunk_bytes = inner, source, memory, chunk_bytes
        self._slots: list[_Slot] = []
        self.items: list[Item] = []
        self.plan()

    @property
    def device_bytes(self) -> int:
        """The bytes of state, and of room for it, that are on the device."""
        return 0

    @property
    def host_bytes(self) -> int:
        """The bytes of state that are on the host."""
        state = sum(nbytes_of(v) for item in self.items for v in self._inner.state.get(item.key, {}).values())
        return state + sum(nbytes_of(item.key) for item in self.items if item.is_mastered)

    def plan(self) -> None:
        """Take up each parameter that is not known yet."""
        pairs = [*self._source.pairs()]
        known = regrouped(self.items, pairs)
        new = [Item(group, p, key) for group, p, key in pairs if p not in known]
        self.items += new
        for item in new:
            if item.is_mastered:
                item.key.data = item.key.data.to("cpu")
        self.adopt()

    def adopt(self) -> None:
        """Take over the state that the optimizer has now."""
        for item in self.items:
            for name, value in (state := self._inner.state.get(item.key, {})).items():
                if isinstance(value, Tensor):
                    state[name] = value.to("cpu")

    def step(self, wanted: Collection[nn.Parameter], *, coefficient: Tensor | None) -> None:
        """Step those of ``wanted`` that have gradients, which ``coefficient`` multiplies."""
        chunks = self._chunked([i for i in self.items if i.parameter in wanted and self._gradient(i) is not None])
        self._source.writes.begin()
        self._make_room(chunks)
        begin, options = self.memory.mark(), Options(self._inner)
        number = None if coefficient is None else coefficient.to("cpu")  # waits; so does each gradient
        for index in range(len(chunks)):
            for ahead in range(index + 1 if index else 0, min(index + SLOTS, len(chunks))):
                self._bring_down(chunks[ahead], self._slots[ahead % SLOTS], begin)
            slot = self._slots[index % SLOTS]
            self.memory.reach(slot.down)
            with options.once(item.group for item in chunks[index]):
                self._step_chunk(chunks[index], slot, number)
            self._bring_up(chunks[index], slot, begin)
        options.keep()
        for slot in self._slots:
            self.memory.wait(slot.up)
        self._source.writes.end()
        self._source.writes.note(item.parameter for chunk in chunks for item in chunk if item.is_mastered)
        self._source.spent(item.parameter for chunk in chunks for item in chunk)

    def _gradient(self, item: Item) -> Tensor | None:
        return self._source.gradient(item.parameter)

    def _chunked(self, items: Sequence[Item]) -> list[list[Item]]:
        chunks: list[list[Item]] = []
        size = 0
        for item in items:
            if not chunks or size + self._need(item) > self._chunk_bytes or not chunks[-1][-1].is_like(item):
                chunks.append([])
                size = 0
            chunks[-1].append(item)
            size += self._need(item)
        return chunks

    def _need(self, item: Item) -> int:
        gradient = self._gradient(item)
        assert gradient is not None
        dense = plain_parts(gradient) if gradient.layout is torch.strided else ()
        brought = (*dense, *plain_parts(item.parameter.detach()))
        return sum(aligned(nbytes_of(part)) for part in brought)

    def _make_room(self, chunks: Sequence[Sequence[Item]]) -> None:
        nbytes = max((sum(self._need(item) for item in chunk) for chunk in chunks), default=0)
        if not self._slots or nbytes > self._slots[0].block.raw.nbytes:
            self.close()
            self._slots += [_Slot(self.memory, nbytes) for _ in range(SLOTS)]

    def _bring_down(self, items: Sequence[Item], slot: _Slot, begin: Mark) -> None:
        slot.empty()
        copies: list[Copy] = []
        for item in items:
            gradient = self._gradient(item)
            assert gradient is not None
            if gradient.layout is not torch.strided:
                slot.gradients[item] = gradient.detach().to("cpu")  # small, and of a size that changes
            else:
                room = slot.gradients[item] = slot.like(gradient.detach())
                copies += zip(plain_parts(room), plain_parts(gradient.detach()), strict=True)
            low = slot.parameters[item] = slot.like(item.parameter.detach())
            if not item.is_mastered or self._source.writes.possible(item.parameter):
                copies += zip(plain_parts(low), plain_parts(item.parameter.detach()), strict=True)
        slot.down = self.memory.store(copies, after=[begin, slot.up])

    def _step_chunk(self, items: Sequence[Item], slot: _Slot, coefficient: Tensor | None) -> None:
        standing = {item: self._stand_in(item, slot) for item in items}
        for item, tensor in standing.items():
            tensor.grad = slot.gradients[item].to(tensor.dtype)
        if coefficient is not None:
            torch._foreach_mul_([local_of(t.grad) for t in standing.values() if t.grad is not None], coefficient)
        if self._source.stood is not None:
            self._source.stood += standing.values()
        states = {tensor: self._inner.state.get(item.key, {}) for item, tensor in standing.items()}
        with stepping(self._inner, {tensor: item.group for item, tensor in standing.items()}, states):
            self._inner.step()
        for item, tensor in standing.items():
            state = self._inner.state.pop(tensor, {})
            if state:
                self._inner.state[item.key] = state
            if item.is_mastered:
                slot.parameters[item].copy_(tensor.detach())

    def _stand_in(self, item: Item, slot: _Slot) -> nn.Parameter:
        if not item.is_mastered:
            return nn.Parameter(slot.parameters[item])
        if self._source.writes.possible(item.parameter):
            self._source.writes.found(item.parameter, taken_over(item.key.detach(), slot.parameters[item]))
        return nn.Parameter(item.key.detach())

    def _bring_up(self, items: Sequence[Item], slot: _Slot, begin: Mark) -> None:
        copies: list[Copy] = []
        for item in items:
            copies += zip(plain_parts(item.parameter.detach()), plain_parts(slot.parameters[item]), strict=True)
        slot.up = self.memory.load(copies, after=[begin])

    def settle(self) -> None:
        """Let the host wait until all copies are made."""
        self.memory.settle()

    def close(self) -> None:
        """Give up the room for what is on its way; the state stays where it is."""
        self.memory.settle()
        for slot in self._slots:
            slot.block.release()
        self._slots.clear()
