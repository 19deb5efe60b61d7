"""What a measured run listens to: the phases of its steps, and a few profiled steps."""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from lightning.pytorch.profilers import PassThroughProfiler, Profiler
from typing_extensions import override

from lightning_ups._compat.torch.device import Kernels, is_profiled, watched_waits
from lightning_ups.insight.throughput import Inspection, Phase, Span, inspect_spans, phase_of

_UNKNOWN: Any = object()
# Number of steps: one to record waits; one to let ranks synchronize after the profiler has started, which takes longer
# on some and would look like communication; two to record kernels.
_WATCHED, _SETTLING, _LOOKED_AT = 1, 1, 2


class ProfilerListener(Profiler):
    """Wraps a Trainer's profiler and reports the phases of a step.

    Args:
        inner: The wrapped profiler.
        enter: Called with the phase that begins.
        leave: Called when the innermost phase ends, except for ``"validation"``, whose end is not reported.
    """

    def __init__(self, inner: Profiler, *, enter: Callable[[Phase], None], leave: Callable[[], None]) -> None:
        super().__init__()
        self._enter, self._leave = enter, leave
        self.inner, self._passes_on = inner, not isinstance(inner, PassThroughProfiler)
        self._phases: dict[str, Phase | None] = {}  # by the names of actions

    @classmethod
    def install(cls, trainer: Any, *, enter: Callable[[Phase], None], leave: Callable[[], None]) -> "ProfilerListener":
        """Wrap the profiler of ``trainer``, and return the wrapper."""
        listener = cls(trainer.profiler, enter=enter, leave=leave)
        trainer.profiler = listener
        return listener

    def remove(self, trainer: Any) -> None:
        """Restore the wrapped profiler."""
        if trainer.profiler is self:
            trainer.profiler = self.inner

    @override
    def start(self, action_name: str) -> None:
        if (phase := self._phase(action_name)) is not None:
            self._enter(phase)
        if self._passes_on:
            self.inner.start(action_name)

    @override
    def stop(self, action_name: str) -> None:
        if self._passes_on:
            self.inner.stop(action_name)
        if self._phase(action_name) not in (None, "validation"):
            self._leave()

    @override
    def profile(self, action_name: str) -> AbstractContextManager[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self._phase(action_name) is None:
            return self.inner.profile(action_name) if self._passes_on else nullcontext(action_name)
        return _Within(self, action_name)

    def _phase(self, action: str) -> Phase | None:
        phase = self._phases.get(action, _UNKNOWN)
        if phase is _UNKNOWN:
            phase = self._phases[action] = phase_of(action)
        return phase

    # Other methods of a profiler

    @override
    def setup(self, *args: Any, **kwargs: Any) -> None:
        self.inner.setup(*args, **kwargs)

    @override
    def teardown(self, *args: Any, **kwargs: Any) -> None:
        self.inner.teardown(*args, **kwargs)

    @override
    def summary(self) -> str:
        return self.inner.summary()

    @override
    def describe(self) -> None:
        self.inner.describe()

    def __del__(self) -> None:
        """Do not end the wrapped profiler."""


class _Within:
    __slots__ = ("_action", "_listener")

    def __init__(self, listener: ProfilerListener, action: str) -> None:
        self._listener, self._action = listener, action

    def __enter__(self) -> str:
        self._listener.start(self._action)
        return self._action

    def __exit__(self, *_: object) -> None:
        self._listener.stop(self._action)


def can_look_at(device: torch.device) -> bool:
    """Return whether kernels of ``device`` can be profiled now."""
    return device.type == "cuda" and not is_profiled()  # there is one profiler, and others may use it


class CloseLook:
    """Profiles a few steps, from the beginning of a step.

    Args:
        done: Called with the result.

    Attributes:
        steps: How many steps it takes.
    """

    steps = _WATCHED + _SETTLING + _LOOKED_AT

    def __init__(self, done: Callable[[Inspection], None]) -> None:
        self._done, self._ended = done, 0
        self._waits: Counter[str] = Counter()
        self._watch = ExitStack()
        self._kernels: Kernels | None = None
        self._watch.enter_context(watched_waits(self._waits))

    def next(self) -> "CloseLook | None":
        """Begin the next step. Return None after the last one."""
        self._ended += 1
        if self._ended == _WATCHED:
            self._watch.close()
            self._kernels = Kernels()
            self._kernels.start()
        if self._ended == _WATCHED + _SETTLING and self._kernels is not None:
            self._kernels.mark()
        if self._ended < self.steps:
            return self
        if self._kernels is not None:
            self._kernels.mark()
        spans = [Span(*kernel) for kernel in self.cancel()]
        waits = [(place, count // _WATCHED) for place, count in self._waits.most_common()]
        self._done(inspect_spans(spans, steps=_LOOKED_AT, waits=waits))
        return None

    def cancel(self) -> list[tuple[str, float, float]]:
        """Stop the profiler, and return its kernels."""
        self._watch.close()
        kernels, self._kernels = self._kernels, None
        return [] if kernels is None else kernels.stop()
