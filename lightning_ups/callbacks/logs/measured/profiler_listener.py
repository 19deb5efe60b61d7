"""The phases of a step, from the actions that the Trainer reports to its profiler."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning.pytorch.profilers import PassThroughProfiler, Profiler
from typing_extensions import override

from lightning_ups.insight.throughput import Phase

__all__ = ["ProfilerListener"]

_UNKNOWN: Any = object()


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
        self.wrap(inner)
        self._phases: dict[str, Phase | None] = {}  # by the names of actions

    @classmethod
    def install(cls, trainer: Any, *, enter: Callable[[Phase], None], leave: Callable[[], None]) -> "ProfilerListener":
        """Wrap the profiler of ``trainer``, and return the wrapper."""
        listener = cls(trainer.profiler, enter=enter, leave=leave)
        trainer.profiler = listener
        return listener

    def remove(self, trainer: Any) -> None:
        """Restore the wrapped profiler, also from inside of another listener."""
        if trainer.profiler is self:
            trainer.profiler = self.inner
            return
        outer = trainer.profiler
        while isinstance(outer, ProfilerListener) and outer.inner is not self:
            outer = outer.inner
        if isinstance(outer, ProfilerListener):
            outer.wrap(self.inner)

    def wrap(self, inner: Profiler) -> None:
        """Wrap ``inner``."""
        self.inner, self._passes_on = inner, not isinstance(inner, PassThroughProfiler)

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
            phase = self._phases[action] = _phase_of(action)
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


_ENDS: tuple[tuple[str, str, Phase], ...] = (  # the beginning and end of an action's name
    ("[", "].train_dataloader_next", "data"),
    ("[Strategy]", ".batch_to_device", "transfer"),
    ("[Strategy]", ".training_step", "forward"),
    ("[Strategy]", ".backward", "backward"),
    ("[LightningModule]", ".optimizer_step", "optimizer"),
    ("optimizer_step", "optimizer_step", "optimizer"),  # under manual optimization
    ("save_checkpoint", "save_checkpoint", "checkpoint"),
    # Reported before validation starts the workers of its loaders. Its end is not reported.
    ("[LightningModule]", ".on_validation_model_zero_grad", "validation"),
)


def _phase_of(action: str) -> Phase | None:
    return next((phase for start, end, phase in _ENDS if action.startswith(start) and action.endswith(end)), None)
