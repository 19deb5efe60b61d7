"""Detects and skips bad steps without waiting for the device, and records the checkpoints to roll back to."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import TypeIs

from lightning_ups._compat.torch.tensors.tensors import count_writes
from lightning_ups._compat.torch.versions import NormWithStatistics
from lightning_ups.state.checkpoint import is_complete

_Place = tuple[nn.Module, str]
_STATISTICS = ("running_mean", "running_var")  # of any class: torch's kernels write them without updating their version
Layout = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The device's verdict on a step.

    Args:
        nonfinite: Whether the loss or the norm is NaN or infinite, on any rank.
        spike: Whether one of them is far above earlier values.
        loss: The loss, averaged over ranks.
        norm: The norm of the gradients; 0 if it is not watched.
        loss_limit: A larger loss is a spike; infinite while there are too few steps.
        norm_limit: The same for the norm.
    """

    nonfinite: bool
    spike: bool
    loss: float
    norm: float
    loss_limit: float
    norm_limit: float

    @classmethod
    def of(cls, values: list[float]) -> "Verdict":
        """Return the verdict that `LossWatch.judge` put into ``values``."""
        nonfinite, spike, *rest = values
        return cls(nonfinite > 0, spike > 0, *rest)

    def __str__(self) -> str:
        """Return the verdict in words."""
        parts = []
        for name, value, limit in (
            ("loss", self.loss, self.loss_limit),
            ("gradients' norm", self.norm, self.norm_limit),
        ):
            if not isfinite(value):
                parts.append(f"the {name} is {value}")
            elif value > limit:
                parts.append(f"the {name} is {value:.6g}, a spike above {limit:.6g}")
        return " and ".join(parts) or f"the loss is {self.loss:.6g}"


class LossWatch:
    """Keeps recent losses and norms on the device, and judges whether the next ones are far above them.

    A spike is more than ``sigmas`` standard deviations above the mean of the last ``window`` steps. For a spike the
    limit is stored instead of the value: one spike does not hide the next, and a loss that stays high becomes normal in
    time. The host reads no value.

    Args:
        device: The device of all tensors.
        window: The number of steps that are remembered.
        sigmas: The number of standard deviations that make a spike.
        least: The number of steps before anything counts as a spike.
    """

    def __init__(self, device: torch.device, *, window: int = 128, sigmas: float = 6.0, least: int = 32) -> None:
        self._last = torch.zeros(window, 2, device=device)
        self._seen = torch.zeros((), dtype=torch.long, device=device)  # number of finite values so far
        self._rows = torch.arange(window, device=device)
        self._sigmas, self._least = sigmas, least

    def judge(self, values: Tensor) -> Tensor:
        """Return a verdict on ``values`` [loss, norm], for `Verdict.of`, in float64 if ``values`` are."""
        dtype = torch.promote_types(values.dtype, self._last.dtype)
        self._last, values = self._last.to(dtype), values.to(dtype)
        window = self._rows.numel()
        there = (self._rows < self._seen).unsqueeze(1)
        count = self._seen.clamp(1, window)
        mean = self._last.sum(0) / count  # rows without a value are zero
        deviation = (((self._last - mean) * there).square().sum(0) / count).sqrt()
        # With a standard deviation of zero, as for a constant loss, rounding errors would be spikes.
        limit = mean + self._sigmas * torch.maximum(deviation, 1e-3 * mean.abs())
        limit = torch.where(self._seen >= self._least, limit, torch.inf)
        finite = values.isfinite().all()
        spike = (values > limit).any() & finite
        row = (self._seen % window).unsqueeze(0)  # a 1-D index: the host would read an index without dimensions
        kept = torch.where(finite, torch.minimum(values, limit), self._last.index_select(0, row).squeeze(0))
        self._last.index_copy_(0, row, kept.unsqueeze(0))
        self._seen += finite
        return torch.cat([torch.stack([~finite, spike]).to(dtype), values, limit])


class Deferred:
    """A queue of tensors that are being copied to the host.

    The delay is fixed, and does not depend on the speed of a device: all ranks read the same values at the same step,
    and can act on them together.

    Args:
        late: The number of later tensors that are pushed before one is read.
    """

    def __init__(self, *, late: int) -> None:
        self.late = late
        self._waiting: deque[tuple[Tensor, torch.cuda.Event | None, Any]] = deque()

    def push(self, values: Tensor, tag: Any) -> None:
        """Start to copy ``values`` to the host."""
        event = None
        if values.is_cuda:
            values = values.to("cpu", non_blocking=True)  # into pinned memory
            event = torch.cuda.Event()
            event.record()
        self._waiting.append((values, event, tag))

    def due(self) -> Iterator[tuple[list[float], Any]]:
        """Yield the values that were pushed more than ``late`` tensors ago, with their tags."""
        while len(self._waiting) > self.late:
            yield self._first()

    def rest(self) -> Iterator[tuple[list[float], Any]]:
        """Yield all remaining values, at the end of training."""
        while self._waiting:
            yield self._first()

    def forget(self) -> None:
        """Drop all remaining values."""
        self._waiting.clear()

    def _first(self) -> tuple[list[float], Any]:
        values, event, tag = self._waiting.popleft()
        if event is not None:
            event.synchronize()  # already passed, unless the host is far ahead
        return values.tolist(), tag


class KeptBuffers:
    """Saves buffers that steps write to, so that a bad step leaves nothing in them.

    Earlier steps show which buffers are written: those of norms always, others once they were written. The first step
    saves all. Not restored are buffers of lazy modules before their first batch, other tensor subclasses and layouts,
    and buffers on the host if the model is on a device, which would require a synchronization.

    Args:
        module: The module with the buffers.
    """

    def __init__(self, module: nn.Module) -> None:
        self._places: list[_Place] = [(inner, name) for inner in module.modules() for name, _ in inner._buffers.items()]
        self._certain = [isinstance(inner, NormWithStatistics) or name in _STATISTICS for inner, name in self._places]
        self._written: list[bool] | None = None
        self._kept: dict[int, Tensor] = {}  # by index
        self._marks: list[tuple[int, int]] = []

    def keep(self) -> None:
        """Save the buffers before a step."""
        buffers = self._buffers()
        self._marks = [_mark(buffer) for buffer in buffers]
        self._kept = {}
        written = self._written or [True] * len(buffers)
        wanted = {i: b for i, b in enumerate(buffers) if written[i] and _can_be_kept(b)}
        for numbers, alike in _by_type(wanted):
            self._kept.update(zip(numbers, _pieces(_flat(alike), alike), strict=True))

    def take_back(self, flag: Tensor) -> None:
        """Restore the buffers if ``flag`` is not zero, without reading it on the host."""
        buffers = self._buffers()
        marks = zip(self._marks, map(_mark, buffers), strict=True)
        known = self._certain if self._written is None else self._written
        self._written = [was or old != new for was, (old, new) in zip(known, marks, strict=True)]
        now = {i: b for i, b in enumerate(buffers) if i in self._kept and self._written[i] and _can_be_kept(b)}
        same = {i: b for i, b in now.items() if _form(b) == _form(self._kept[i]) and b.device.type == flag.device.type}
        for numbers, alike in _by_type(same):
            kept = _flat([self._kept[number] for number in numbers])
            chosen = torch.where(flag.to(kept.device) > 0, kept, _flat(alike))
            with torch.no_grad():
                torch._foreach_copy_(alike, _pieces(chosen, alike))
        self._kept = {}

    def _buffers(self) -> list[Tensor | None]:
        return [getattr(module, name, None) for module, name in self._places]


def _can_be_kept(buffer: Tensor | None) -> TypeIs[Tensor]:
    # An inference tensor has no version, and is not written in a step.
    if type(buffer) is not Tensor or buffer.is_inference():
        return False
    return buffer.layout is torch.strided and not (buffer.is_nested or buffer.is_quantized)


def _mark(buffer: Tensor | None) -> tuple[int, int]:
    return id(buffer), count_writes(buffer) if _can_be_kept(buffer) else -1


def _form(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def _by_type(buffers: Mapping[int, Tensor]) -> list[tuple[list[int], list[Tensor]]]:
    """Group buffers by dtype and device, for one kernel each; return their indices and tensors."""
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for number, buffer in buffers.items():
        groups.setdefault((buffer.dtype, buffer.device), []).append(number)
    return [(numbers, [buffers[number] for number in numbers]) for numbers in groups.values()]


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _pieces(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    pieces = flat.split([tensor.numel() for tensor in like])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]


def layout_of(optimizers: Iterable[Optimizer]) -> Layout:
    """Return the number of parameters in each group: state of an optimizer with other groups cannot be loaded."""
    return tuple(tuple(len(group["params"]) for group in optimizer.param_groups) for optimizer in optimizers)


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    step: int
    path: Path
    layout: Layout


class Saved:
    """Records complete checkpoints of a run, with their step and parameter groups."""

    def __init__(self) -> None:
        self._all: list[_Checkpoint] = []

    def add(self, path: Path, *, step: int, layout: Layout) -> None:
        """Record a checkpoint, replacing an earlier one at the same path."""
        self.forget(path)
        self._all.append(_Checkpoint(step, path, layout))

    def forget(self, path: Path) -> None:
        """Record that ``path`` has no such checkpoint any more."""
        self._all = [each for each in self._all if each.path != path]

    def newest(self, *, step: int, layout: Layout) -> Path | None:
        """Return the newest one from before ``step`` that is still complete and fits ``layout``."""
        return next((each.path for each in reversed(self._before(step)) if each.layout == layout), None)

    def others(self, *, step: int, layout: Layout) -> list[Path]:
        """Return the complete ones from before ``step`` that do not fit ``layout``."""
        return [each.path for each in self._before(step) if each.layout != layout]

    def undo(self, *, step: int) -> list[Path]:
        """Forget those from after ``step``, and return those of them that are still complete."""
        undone = [each.path for each in self._all if each.step > step and is_complete(each.path)]
        self._all = [each for each in self._all if each.step <= step]
        return undone

    def _before(self, step: int) -> Sequence[_Checkpoint]:
        return [each for each in self._all if each.step <= step and is_complete(each.path)]
