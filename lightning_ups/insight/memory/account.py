"""Accounting for memory: what is alive, of which kind, whose it is, and when it was most.

Tensors are counted by their storage, as torch's allocator for GPUs counts them: rounded up to 512 bytes, from the
moment an operator makes one to the moment the last reference to it goes. That needs no numbers in the tensors, so a
step can be rehearsed on fake ones; see `lightning_ups.insight.memory.step`.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_ups._compat.torch.fake_tensors import is_tracing

__all__ = ["FIXED", "GIB", "Kind", "Ledger", "Moment", "Phase", "allocated", "readable"]

GIB = 2**30
_GRAIN = 512  # bytes: the allocator gives multiples of it

Kind = Literal[
    "parameters",
    "master weights",
    "gradients",
    "optimizer state",
    "buffers",
    "batch",
    "activations",
    "temporaries",
    "gather buffers",
    "workspaces",
]
Phase = Literal["setup", "forward", "backward", "optimizer"]
FIXED: tuple[Kind, ...] = ("parameters", "master weights", "gradients", "optimizer state")


def allocated(size: int) -> int:
    """Return what the allocator gives for ``size`` bytes."""
    return -(-size // _GRAIN) * _GRAIN


def readable(size: float) -> str:
    """Return ``size`` bytes for people: in GiB, or in MiB where that is less than a tenth of one."""
    if abs(size) < 0.1 * GIB:
        size = 0 if abs(size) < 0.05 * 2**20 else size  # no -0.0
        return f"{size / 2**20:.1f} MiB" if abs(size) < 10 * 2**20 else f"{size / 2**20:.0f} MiB"
    return f"{size / GIB:.1f} GiB" if abs(size) >= 0.95 * GIB else f"{size / GIB:.2f} GiB"


@dataclass(frozen=True, kw_only=True)
class Moment:
    """What was alive at a moment.

    Args:
        phase: The part of the step.
        place: The block that was running, by name; empty outside of all.
        held: Bytes by kind and owner. The owner of an activation is the block that made it.
        on_host: Bytes of the host's memory that are held besides, at the most.
    """

    phase: Phase = "setup"
    place: str = ""
    held: Mapping[tuple[Kind, str], int] = field(default_factory=dict)
    on_host: int = 0

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(self.held.values())

    def of(self, *kinds: Kind) -> int:
        """Return the bytes of these kinds."""
        return sum(size for (kind, _), size in self.held.items() if kind in kinds)

    def by_kind(self) -> dict[Kind, int]:
        """Return the bytes of each kind, the most first."""
        sums: dict[Kind, int] = {}
        for (kind, _), size in self.held.items():
            sums[kind] = sums.get(kind, 0) + size
        return dict(sorted(sums.items(), key=lambda entry: -entry[1]))

    def by_owner(self, *kinds: Kind) -> dict[str, int]:
        """Return the bytes of each owner, of these kinds, the most first."""
        sums: dict[str, int] = {}
        for (kind, owner), size in self.held.items():
            if kind in kinds:
                sums[owner] = sums.get(owner, 0) + size
        return dict(sorted(sums.items(), key=lambda entry: -entry[1]))


@dataclass
class _Record:
    size: int
    kind: Kind
    owner: str
    finalizer: Any = None


class Ledger(TorchDispatchMode):
    """A mode in which every tensor that an operator makes is entered, and struck out when its memory is freed.

    Attributes:
        phase: The part of the step that runs.
        place: The block that runs.
        peaks: For each phase, when the most was alive.
        loose: For each phase and place, when the most was alive of what is not `FIXED`: where those are sharded, the
            peak may be another one.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.phase: Phase = "setup"
        self.place = ""
        self.peaks: dict[Phase, Moment] = {}
        self.loose: dict[tuple[Phase, str], Moment] = {}
        self._records: dict[int, _Record] = {}
        self._held: dict[tuple[Kind, str], int] = {}
        self._total = self._fixed = 0
        self._peaks: dict[Phase, int] = {}
        self._loose: dict[tuple[Phase, str], int] = {}
        self._paused = 0

    @classmethod
    @override
    def is_infra_mode(cls) -> bool:
        return True  # so that Dynamo traces what runs in it

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._paused and not is_tracing():
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor):
                    self.enter(leaf)
        return result

    @property
    def total(self) -> int:
        """Bytes that are alive."""
        return self._total

    @property
    def peak(self) -> Moment:
        """When the most was alive."""
        return max(self.peaks.values(), key=lambda moment: moment.total, default=Moment())

    def now(self) -> Moment:
        """Return what is alive."""
        return Moment(phase=self.phase, place=self.place, held={key: n for key, n in self._held.items() if n})

    def enter(self, tensor: Tensor) -> None:
        """Count ``tensor``, unless its memory is counted already."""
        for key, size, storage in _memory(tensor):
            if key not in self._records and size:
                kind: Kind = "activations" if self.phase == "forward" else "temporaries"
                record = _Record(allocated(size), kind, self.place)
                record.finalizer = weakref.ref(storage, partial(self._strike, key))
                self._records[key] = record
                self._add(record.kind, record.owner, record.size)

    def claim(self, tensors: Iterable[Tensor], kind: Kind, owner: str = "") -> None:
        """Say of what kind ``tensors`` are, and whose; those that are not counted yet are."""
        for tensor in tensors:
            self.enter(tensor)
            for key, _, _ in _memory(tensor):
                if (record := self._records.get(key)) is not None:
                    self._add(record.kind, record.owner, -record.size)
                    record.kind, record.owner = kind, owner
                    self._add(kind, owner, record.size)

    def leave_out(self, tensor: Tensor) -> None:
        """Count ``tensor`` as nothing, such as memory of the host."""
        with self.paused():
            for key, _, storage in _memory(tensor):
                self._strike(key, None)
                self._records[key] = _Record(0, "temporaries", "", weakref.ref(storage, partial(self._strike, key)))

    def owner_of(self, tensor: Tensor, kind: Kind) -> str | None:
        """Return whose ``tensor`` is, or None if it is not of that kind."""
        records = (self._records.get(key) for key, _, _ in _memory(tensor))
        return next((record.owner for record in records if record is not None and record.kind == kind), None)

    def start(self, phase: Phase, place: str = "") -> None:
        """Note that ``phase`` begins, in ``place``."""
        self.phase, self.place = phase, place
        self._look()

    def forget_peaks(self) -> None:
        """Begin anew with what is alive now, as ``reset_peak_memory_stats`` does."""
        self._peaks, self._loose, self.peaks, self.loose = {}, {}, {}, {}
        self._look()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Enter nothing while the context is open."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """Enter what is made, though this is inside a pause."""
        before, self._paused = self._paused, 0
        try:
            yield
        finally:
            self._paused = before

    def _strike(self, key: int, _: Any) -> None:
        if (record := self._records.pop(key, None)) is not None:
            self._add(record.kind, record.owner, -record.size)

    def _add(self, kind: Kind, owner: str, size: int) -> None:
        self._held[kind, owner] = self._held.get((kind, owner), 0) + size
        self._total += size
        if kind in FIXED:
            self._fixed += size
        if size > 0:
            self._look()

    def _look(self) -> None:
        if self._total > self._peaks.get(self.phase, -1):
            self._peaks[self.phase], self.peaks[self.phase] = self._total, self.now()
        key: tuple[Phase, str] = (self.phase, self.place)
        loose = self._total - self._fixed
        if loose > self._loose.get(key, -1):
            self._loose[key], self.loose[key] = loose, self.now()


def _memory(tensor: Tensor) -> Iterator[tuple[int, int, Any]]:
    for part in _parts(tensor):
        storage = part.untyped_storage()
        yield storage._cdata, storage.nbytes(), storage


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    # A subclass that wraps tensors, such as those with values in eight bits and their scales, has the memory of these.
    flatten: Callable[[], Any] | None = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    for name in flatten()[0]:
        part = getattr(tensor, name)
        if isinstance(part, Tensor):
            yield from _parts(part)
