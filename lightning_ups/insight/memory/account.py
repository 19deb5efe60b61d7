"""A ledger of live memory: of which kind, owned by which block, and when it was largest.

Storages are counted as torch's CUDA allocator counts them: rounded up to 512 bytes, from the operator that creates one
until its last reference is gone. That works on fake tensors too.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_ups._compat.torch.fake_tensors import is_tracing

GIB = 2**30
_GRAIN = 512  # bytes: the allocator returns multiples of it

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
_Name = TypeVar("_Name", bound=str)
FIXED: tuple[Kind, ...] = ("parameters", "master weights", "gradients", "optimizer state")


def allocated(size: int) -> int:
    """Return the bytes that the allocator returns for a request of ``size`` bytes."""
    return -(-size // _GRAIN) * _GRAIN


def readable(size: float) -> str:
    """Return ``size`` bytes as text: in GiB, or in MiB below a tenth of a GiB."""
    if abs(size) < 0.1 * GIB:
        size = 0 if abs(size) < 0.05 * 2**20 else size  # no -0.0
        return f"{size / 2**20:.1f} MiB" if abs(size) < 10 * 2**20 else f"{size / 2**20:.0f} MiB"
    return f"{size / GIB:.1f} GiB" if abs(size) >= 0.95 * GIB else f"{size / GIB:.2f} GiB"


@dataclass(frozen=True, kw_only=True)
class Moment:
    """The live memory at a moment.

    Args:
        phase: The part of the step.
        place: The name of the block that ran; empty outside of blocks.
        held: Bytes by kind and owner. The owner of an activation is the block that created it.
        on_host: Bytes of host memory, at most.
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
        """Return the bytes of each kind, the largest first."""
        return _summed((kind, size) for (kind, _), size in self.held.items())

    def by_owner(self, *kinds: Kind) -> dict[str, int]:
        """Return the bytes of each owner of these kinds, the largest first."""
        return _summed((owner, size) for (kind, owner), size in self.held.items() if kind in kinds)


def _summed(sizes: Iterable[tuple[_Name, int]]) -> dict[_Name, int]:
    sums: Counter[_Name] = Counter()
    for name, size in sizes:
        sums[name] += size
    return dict(sums.most_common())


@dataclass
class _Record:
    size: int
    kind: Kind
    owner: str
    finalizer: Any = None


class Ledger(TorchDispatchMode):
    """A dispatch mode that counts each tensor that an operator creates, until its memory is freed.

    Attributes:
        phase: The current part of the step.
        place: The current block.
        peaks: The largest moment of each phase.
        loose: The moment of each phase and place with the most memory that is not `FIXED`: if the fixed kinds are
            sharded, the peak may be another one.
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
        return True  # so that Dynamo traces code that runs in it

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
        """Live bytes."""
        return self._total

    @property
    def peak(self) -> Moment:
        """The largest moment."""
        return max(self.peaks.values(), key=lambda moment: moment.total, default=Moment())

    def now(self) -> Moment:
        """Return the live memory."""
        return Moment(phase=self.phase, place=self.place, held={key: n for key, n in self._held.items() if n})

    def enter(self, tensor: Tensor) -> None:
        """Count ``tensor``, unless its storage is counted already."""
        for key, size, storage in _memory(tensor):
            if key not in self._records and size:
                kind: Kind = "activations" if self.phase == "forward" else "temporaries"
                record = _Record(allocated(size), kind, self.place)
                record.finalizer = weakref.ref(storage, partial(self._strike, key))
                self._records[key] = record
                self._add(record.kind, record.owner, record.size)

    def claim(self, tensors: Iterable[Tensor], kind: Kind, owner: str = "") -> None:
        """Set the kind and owner of ``tensors``, and count those that are not counted yet."""
        for tensor in tensors:
            self.enter(tensor)
            for key, _, _ in _memory(tensor):
                if (record := self._records.get(key)) is not None:
                    self._add(record.kind, record.owner, -record.size)
                    record.kind, record.owner = kind, owner
                    self._add(kind, owner, record.size)

    def leave_out(self, tensor: Tensor) -> None:
        """Count ``tensor`` as zero bytes, such as host memory."""
        with self.paused():
            for key, _, storage in _memory(tensor):
                self._strike(key, None)
                self._records[key] = _Record(0, "temporaries", "", weakref.ref(storage, partial(self._strike, key)))

    def owner_of(self, tensor: Tensor, kind: Kind) -> str | None:
        """Return the owner of ``tensor``, or None if it is not of that kind."""
        records = (self._records.get(key) for key, _, _ in _memory(tensor))
        return next((record.owner for record in records if record is not None and record.kind == kind), None)

    def start(self, phase: Phase, place: str = "") -> None:
        """Begin ``phase`` in ``place``."""
        self.phase, self.place = phase, place
        self._look()

    def forget_peaks(self) -> None:
        """Reset the peaks to the live memory, as ``reset_peak_memory_stats`` does."""
        self._peaks, self._loose, self.peaks, self.loose = {}, {}, {}, {}
        self._look()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count no new tensor while the context is open."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """Count new tensors, inside of a pause."""
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
    # A wrapper subclass, such as 8-bit optimizer state with its scales, has the memory of the tensors inside.
    flatten: Callable[[], Any] | None = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    for name in flatten()[0]:
        part = getattr(tensor, name)
        if isinstance(part, Tensor):
            yield from _parts(part)
