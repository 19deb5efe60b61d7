"""An optimizer whose state lies on the host, and which is one to everybody else.

It wraps an optimizer of any class that treats each parameter by itself, over the same parameter groups:

    optimizer = OffloadedOptimizer(AdamW(module.parameters(), lr=3e-4))
    ...
    optimizer.undo()

With master weights these are state too, and the largest part of it: ``OffloadedOptimizer(MasteredOptimizer(...))``.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ups._compat.torch.optimizers import hooked_once, share_state_dict_hooks
from lightning_ups.optim.delegating import DelegatingOptimizer
from lightning_ups.optim.master_weights import nothing_to_settle
from lightning_ups.optim.mastered import MasteredOptimizer
from lightning_ups.optim.offload.admission import Admission, admit
from lightning_ups.optim.offload.host import HostSteps
from lightning_ups.optim.offload.memory import Memory, memory_of
from lightning_ups.optim.offload.source import MasteredSource, Source
from lightning_ups.optim.offload.streamed import StreamedSteps

Update = Literal["device", "host"]


class OffloadedOptimizer(DelegatingOptimizer):
    """Keeps the state of an optimizer on the host, and steps it in chunks.

    Groups, options, gradients and the numbers of a state dict are those of the optimizer that it wraps. The state
    that one looks at is on the host; what one writes there, counts.

    Args:
        inner: The optimizer, which may have state already, or one with master weights.
        update: ``"device"``: the state of a chunk comes to the device, is stepped there, and goes back. ``"host"``:
            the CPU steps; gradients come down, parameters go up.
        chunk_bytes: The most that one of the three chunks on the device has of state. A parameter that has more is
            stepped in parts, if the optimizer treats each element by itself.
        resident: The share of the state that stays on the device, where steps are made there.
        memory: Where state is kept and where it is used. None: as the device of the parameters has it.
        admission: What is known of ``inner``. None: it is tried on tiny tensors.

    Attributes:
        stepper: The optimizer that makes the steps: the one inside that with master weights.
        steps: Where the state lies, and how much of it.
        steps_made: How many were made with gradients.

    Raises:
        ValueError: If an argument is out of its range, or stepping in chunks is not, bit for bit, stepping as a whole.
    """

    def __init__(
        self,
        inner: Optimizer,
        *,
        update: Update = "device",
        chunk_bytes: int = 256 * 2**20,
        resident: float = 0.0,
        memory: Memory | None = None,
        admission: Admission | None = None,
    ) -> None:
        self.check(update=update, chunk_bytes=chunk_bytes, resident=resident)
        mastered = inner if isinstance(inner, MasteredOptimizer) else None
        stepper = inner if mastered is None else mastered.inner
        on_host = update == "host"
        self.admission = admission or admit(
            stepper,
            partial(_twin_of_ours, update=update, stands_in=on_host or mastered is not None),
            in_parts=not on_host,
            device=torch.device("cpu") if on_host else None,
        )
        self._inner: Optimizer = inner
        self._coefficient: Tensor | None = None
        self._has_other_state = False  # someone has put in what has no place on the host yet
        self.steps_made = 0
        self.stepper = stepper
        super().__init__([{"params": [nn.Parameter(torch.empty(0))]}], inner.defaults)  # its hooks; groups are inner's
        share_state_dict_hooks(self, inner)
        self.source = Source(inner) if mastered is None else MasteredSource(mastered)
        memory = memory_of(_device_of(inner)) if memory is None else memory
        with torch.no_grad():
            if on_host:
                self.steps = HostSteps(stepper, self.source, memory=memory, chunk_bytes=chunk_bytes)
            else:
                self.steps = StreamedSteps(
                    stepper,
                    self.source,
                    memory=memory,
                    chunk_bytes=chunk_bytes,
                    admission=self.admission,
                    resident=resident,
                )
        if mastered is not None:
            mastered.masters.settle = self.steps.settle

    @staticmethod
    def check(*, update: str, chunk_bytes: int, resident: float) -> None:
        """Raise ValueError if an argument is out of its range."""
        if update not in get_args(Update):
            raise ValueError(f"update={update!r} is not a known choice. Use one of {get_args(Update)}.")
        if chunk_bytes < 1:
            raise ValueError(
                f"chunk_bytes={chunk_bytes} is no size. It is how much state is on the device at a time."
                " Use a number of bytes, such as 2**28."
            )
        if not 0 <= resident < 1 or (resident and update == "host"):
            raise ValueError(
                f"resident={resident} is given with update={update!r}. It is the share of the state that stays on the"
                " device, from 0 to less than 1. Use a smaller share, or update='device'."
            )

    @property
    @override
    def param_groups(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The groups of the wrapped optimizer."""
        return self._inner.param_groups

    @param_groups.setter
    def param_groups(self, value: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Put others in their place, as callbacks do that unfreeze parameters, when a run is resumed."""
        if hasattr(self, "steps"):  # ``Optimizer.__init__`` sets them too
            self._inner.param_groups = value
            with torch.no_grad():
                self.steps.plan()

    @property
    @override
    def state(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The state, on the host; what is written into it stays there."""
        if not hasattr(self, "steps"):
            return {}
        self.steps.settle()
        return _States(self.stepper.state, self._note_other_state)

    @state.setter
    def state(self, value: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Put other state in its place, as who begins anew does."""
        if not hasattr(self, "steps") or isinstance(value, _States):
            return  # ``Optimizer.__init__`` sets it too
        self.steps.settle()
        self._inner.state = defaultdict(dict, value)
        self._note_other_state()

    def _note_other_state(self) -> None:
        self._has_other_state = True

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if not hasattr(self, "steps"):
            return  # called by ``Optimizer.__init__``
        self._inner.add_param_group(param_group)
        with torch.no_grad():
            self.steps.plan()

    @property
    def host_bytes(self) -> int:
        """The bytes of state, masters included, that are on the host."""
        return self.steps.host_bytes

    @property
    def device_bytes(self) -> int:
        """The bytes of state, and of room for it, that are on the device."""
        return self.steps.device_bytes

    def take_clip_coefficient(self, coefficient: Tensor) -> None:
        """Multiply the gradients of the next step by ``coefficient``."""
        self._coefficient = coefficient

    @property
    def in_one_kernel(self) -> bool:
        """Whether the step of a chunk is one pass over it: `adamw_step.settings_of` says when."""
        return isinstance(self.steps, StreamedSteps) and self.steps.in_one_kernel

    def allow_one_kernel(self) -> None:
        """Make AdamW's step as `adamw_step` does, since it would be made so without offloading."""
        if isinstance(self.steps, StreamedSteps):
            self.steps.allows_one_kernel = True

    def gradients(self) -> Sequence[Tensor]:
        """Return the gradients that the next step will use, before any clipping."""
        return self.source.gradients()

    @override
    def delegate_step(self, loss: float | None, *, has_closure: bool) -> None:
        coefficient, self._coefficient = self._coefficient, None
        if isinstance(self._inner, MasteredOptimizer):
            self._inner.prepare_step()
        if self._has_other_state:
            self._has_other_state = False
            self.steps.adopt()
        wanted = {parameter for group in self.param_groups for parameter in group["params"]}
        has_gradients = any(self.source.gradient(parameter) is not None for parameter in wanted)
        with hooked_once(self.stepper):
            self.steps.step(wanted, coefficient=coefficient)
        self.steps_made += has_gradients  # without any no state comes of it

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        self._inner.zero_grad(set_to_none)

    @override
    def state_dict(self) -> dict[str, Any]:
        self.steps.settle()
        return self._inner.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps.settle()
        with torch.no_grad():
            with _on_host(self.stepper) as real:
                self._inner.load_state_dict(state_dict)
                real()
            self.steps.adopt()

    def undo(self) -> Optimizer:
        """Return the wrapped optimizer, with its state, which stays where it is."""
        self.steps.close()
        if isinstance(self._inner, MasteredOptimizer):
            self._inner.masters.settle = nothing_to_settle
        self.source.undo()
        return self._inner


class _States(MutableMapping[Any, Any]):
    """What `OffloadedOptimizer.state` shows: whose values stay on the host, whoever would move them."""

    def __init__(self, states: MutableMapping[Any, Any], changed: Callable[[], None] = lambda: None) -> None:
        self._states, self._changed = states, changed  # called for what has no place there yet

    @override
    def __getitem__(self, key: Any) -> Any:
        value = self._states[key]
        return _State(value, self._changed) if isinstance(value, MutableMapping) else value

    @override
    def __setitem__(self, key: Any, value: Any) -> None:
        kept = self._states.get(key)
        if isinstance(value, MutableMapping) and isinstance(kept, MutableMapping) and value.keys() == kept.keys():
            self[key].update(value)
        else:
            self._states[key] = dict(value) if isinstance(value, _States) else value
            self._changed()

    @override
    def __delitem__(self, key: Any) -> None:
        raise TypeError(
            "State was deleted from an OffloadedOptimizer, whose chunks have their places on the host."
            " Load a state dict without it, or overwrite it."
        )

    @override
    def __iter__(self) -> Iterator[Any]:
        return iter(self._states)

    @override
    def __len__(self) -> int:
        return len(self._states)


class _State(_States):
    @override
    def __setitem__(self, key: Any, value: Any) -> None:
        kept = self._states.get(key)
        if isinstance(kept, Tensor) and isinstance(value, Tensor) and kept.shape == value.shape:
            if value is not kept:  # Lightning moves state to the device when it has restored it: it stays here
                kept.copy_(value)
        elif value is not kept:
            self._states[key] = value
            self._changed()


@contextmanager
def _on_host(optimizer: Optimizer) -> Iterator[Callable[[], None]]:
    """Let ``optimizer`` believe that its parameters are on the host, so that the state it loads comes no further.

    Yields:
        A function that gives what was loaded to the real parameters.
    """
    real = [[*group["params"]] for group in optimizer.param_groups]
    stand_ins = {p: nn.Parameter(torch.empty((), dtype=p.dtype), requires_grad=False) for ps in real for p in ps}
    for p, stand_in in stand_ins.items():
        stand_in.stands_for = p  # type: ignore[attr-defined]  # for who must know how it is sharded
    _set_params(optimizer, [[stand_ins[p] for p in ps] for ps in real])

    def give() -> None:
        loaded = {p: optimizer.state[s] for p, s in stand_ins.items() if s in optimizer.state}
        for stand_in in stand_ins.values():
            optimizer.state.pop(stand_in, None)
        _set_params(optimizer, real)
        optimizer.state.update(loaded)
        for group in optimizer.param_groups:
            for p in group["params"]:
                for name, value in loaded.get(p, {}).items():
                    # Where torch wants the count of steps, on the device, if a kernel on the device reads it.
                    count = isinstance(value, Tensor) and not value.dim()
                    if count and (group.get("fused") or group.get("capturable")):
                        loaded[p][name] = value.to(device=p.device)

    try:
        yield give
    finally:
        _set_params(optimizer, real)


def _set_params(optimizer: Optimizer, params: Sequence[list[nn.Parameter]]) -> None:
    for group, mine in zip(optimizer.param_groups, params, strict=True):
        group["params"] = mine


def _device_of(optimizer: Optimizer) -> torch.device:
    return next((p.device for group in optimizer.param_groups for p in group["params"]), torch.device("cpu"))


def _twin_of_ours(inner: Optimizer, admission: Admission, *, update: Update, stands_in: bool) -> OffloadedOptimizer:
    """Return an offloaded optimizer for the admission itself: every parameter, or part of one, by itself."""
    ours = OffloadedOptimizer(inner, update=update, chunk_bytes=1, admission=admission)
    ours.source.stood = [] if stands_in else None
    return ours
