"""torchao's CPUOffloadOptimizer, where it is valid, as an optimizer that schedulers and checkpoints can use."""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ups._compat.optional.packages import require
from lightning_ups.optim.delegating import DelegatingOptimizer
from lightning_ups.optim.mastered import MasteredOptimizer
from lightning_ups.optim.offload.chunks import nbytes_of

DEVICES = ("cuda", "xpu")


def invalid_reasons(optimizer: Optimizer, *, clips: bool) -> list[str]:
    """Return why torchao's CPUOffloadOptimizer would not train as ``optimizer`` does; empty where it would.

    Args:
        optimizer: The optimizer to replace.
        clips: Whether gradients are changed between backward and the step.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    checks = {
        f"it wants parameters on {' or '.join(DEVICES)}": any(p.device.type not in DEVICES for p in parameters),
        "it copies gradients during backward, before they are clipped": clips,
        "it copies gradients during backward, before ranks exchange them": dist.is_initialized()
        and dist.get_world_size() > 1,
        "it knows no sharded parameters": any(isinstance(p, DTensor) for p in parameters),
        "it steps the weights that the module computes with, and knows no masters of them": isinstance(
            optimizer, MasteredOptimizer
        ),
        "it makes its own optimizers, and these would not have the state that is there": bool(optimizer.state),
    }
    return [reason for reason, holds in checks.items() if holds]


class TorchAOOffloaded(DelegatingOptimizer):
    """Steps by torchao's CPUOffloadOptimizer, over the groups of the optimizer that it replaces.

    Gradients come down in backward, the CPU steps, parameters go up. Its state dict is torchao's.

    Args:
        inner: The optimizer; its class and options are torchao's.
        clips: See `invalid_reasons`.

    Raises:
        ValueError: If it would not train as ``inner`` does.
    """

    def __init__(self, inner: Optimizer, *, clips: bool) -> None:
        if reasons := invalid_reasons(inner, clips=clips):
            raise ValueError(
                f"torchao's CPUOffloadOptimizer cannot stand for {type(inner).__name__} here: {'; '.join(reasons)}."
                " Use update='device' or update='host', which have none of these limits."
            )
        made = require("torchao.optim", requirement="torchao", extra="float8", feature="update='torchao'")
        self.stepper = inner
        super().__init__([{**group, "params": [*group["params"]]} for group in inner.param_groups], inner.defaults)
        self._offloaded: Any = made.CPUOffloadOptimizer([_given(group) for group in self.param_groups], type(inner))
        self.steps_made = 0

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self._refuse_other_groups()
        super().add_param_group(param_group)

    @property
    @override
    def param_groups(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Groups like those of the optimizer that it replaces."""
        return self._groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Take the groups that ``Optimizer.__init__`` sets, and refuse others."""
        self._refuse_other_groups()
        self._groups = value

    def _refuse_other_groups(self) -> None:
        if hasattr(self, "_offloaded"):
            raise ValueError(
                "Groups of parameters cannot be added under update='torchao': it would never step them."
                " Use update='host' or 'device', which take groups, or give the optimizer all parameters at first."
            )

    @property
    def host_bytes(self) -> int:
        """The bytes that torchao keeps on the host: parameters, their gradients and state."""
        kept = [t for p in self._offloaded.param_d2h_map.values() for t in (p, p.grad) if t is not None]
        states = [state for o in self._offloaded.optim_dict.values() for state in o.state.values()]
        return sum(map(nbytes_of, kept)) + sum(nbytes_of(value) for state in states for value in state.values())

    @property
    def device_bytes(self) -> int:
        """The bytes of state on the device: of what is too small to be offloaded."""
        small = self._offloaded.d_opt
        states = [] if small is None else small.state.values()
        return sum(nbytes_of(value) for state in states for value in state.values())

    @property
    @override
    def state(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Nothing to be moved or read: torchao keeps it."""
        return {}

    @state.setter
    def state(self, value: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Leave it where it is."""

    @override
    def delegate_step(self, loss: float | None, *, has_closure: bool) -> None:
        self._hand_over_options()
        self._offloaded.step()
        self.steps_made += 1

    def _hand_over_options(self) -> None:
        on_device = self._offloaded.d_opt
        small = iter(() if on_device is None else on_device.param_groups)
        for group in self.param_groups:
            options = {name: value for name, value in _given(group).items() if name != "params"}
            apart = [self._offloaded.optim_dict.get(p) for p in group["params"] if p.requires_grad]
            for optimizer in filter(None, apart):
                optimizer.param_groups[0].update(options)
            if None in apart and (own := next(small, None)) is not None:
                own.update(options)

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        self._offloaded.queue.clear()  # of gradients that are on their way, which a step that is left out would use
        self._offloaded.zero_grad(set_to_none=True)

    @override
    def state_dict(self) -> dict[str, Any]:
        groups = [{name: value for name, value in group.items() if name != "params"} for group in self.param_groups]
        return {**self._offloaded.state_dict(), "param_groups": groups}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if "offloaded" not in state_dict:
            raise ValueError(
                "The checkpoint holds the state of an optimizer as torch has it, which update='torchao' cannot read."
                " Use update='host' or 'device', which read it, or the checkpoint of a run with update='torchao'."
            )
        self._offloaded.load_state_dict(state_dict)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(saved)

    def undo(self) -> Optimizer:
        """Return the replaced optimizer; the state stays with torchao."""
        return self.stepper


def _given(group: dict[str, Any]) -> dict[str, Any]:
    trainable: Sequence[nn.Parameter] = [p for p in group["params"] if p.requires_grad]
    # What is not decided is for torchao: it takes the fused kernel of the CPU.
    return {
        **{name: value for name, value in group.items() if value is not None and not isinstance(value, Tensor)},
        "params": trainable,
    }
