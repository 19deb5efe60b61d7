"""An optimizer whose state is split over ranks that all have the weights and gradients (ZeRO stage 1)."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any, NoReturn, SupportsIndex

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ups._compat.torch.optimizers import has_modes, needs_closure, share_state_dict_hooks
from lightning_ups.optim.delegating import DelegatingOptimizer


class PartitionedOptimizer(DelegatingOptimizer):
    """Lets each rank step a part of the parameters, and then gives all ranks all of them.

    Groups, schedulers and clipping see every parameter. State exists for a rank's own part only. After
    `consolidate_state_dict`, the state dict on one rank is that of an optimizer on one device.

    Args:
        inner: The optimizer, which must step each parameter by itself. All ranks have equal parameters and gradients.

    Raises:
        ValueError: If ``inner`` cannot step without a closure, or has other weights for evaluation.
    """

    def __init__(self, inner: Optimizer) -> None:
        if needs_closure(inner) or has_modes(inner):
            raise ValueError(
                f"{type(inner).__name__} does not step each parameter by itself, so its state cannot be split over"
                " ranks. Leave out shard_optimizer_state, or use another optimizer."
            )
        self.stepper, self._rank, self._world = inner, dist.get_rank(), dist.get_world_size()
        self._owners: dict[Tensor, int] = {}
        self._loads = [0] * self._world
        self._consolidated: dict[str, Any] | None = None
        self._complete = False
        super().__init__(inner.param_groups, inner.defaults)
        self._complete = True
        share_state_dict_hooks(self, inner)
        self._assign()
        for parameter in [p for p in inner.state if self._owners.get(p, self._rank) != self._rank]:
            del inner.state[parameter]  # some make it when they are made, such as Adagrad

    @override
    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            f"A PartitionedOptimizer over {type(self.stepper).__name__} can be neither copied nor pickled, because each"
            " rank has a part of its state. Copy its attribute `stepper`."
        )

    def _assign(self) -> None:
        """Give each parameter without an owner to the rank with the least to do."""
        new = [p for p in self._parameters() if p not in self._owners]
        for parameter in sorted(new, key=Tensor.numel, reverse=True):
            rank = self._owners[parameter] = self._loads.index(min(self._loads))
            self._loads[rank] += parameter.numel()

    def _parameters(self) -> list[nn.Parameter]:
        return [*chain.from_iterable(group["params"] for group in self.param_groups)]

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._complete:
            self.stepper.add_param_group(param_group)
            self._assign()

    @property
    @override
    def param_groups(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The groups of the wrapped optimizer."""
        return self.stepper.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Put others in their place, as callbacks do that unfreeze parameters, when a run is resumed."""
        if self._complete:  # ``Optimizer.__init__`` sets an empty list
            self.stepper.param_groups = value
            self._assign()

    @property
    @override
    def state(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The state of this rank's parameters."""
        return self.stepper.state

    @state.setter
    def state(self, value: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Put other state in its place."""
        if self._complete:
            self.stepper.state = value

    @override
    def delegate_step(self, loss: float | None, *, has_closure: bool) -> None:
        with self._own_parameters() as any_left:
            if any_left:
                self.stepper.step()
        self._exchange()

    @contextmanager
    def _own_parameters(self) -> Iterator[bool]:
        """Let the wrapped optimizer have the parameters of this rank alone."""
        groups, params = self.stepper.param_groups, [group["params"] for group in self.stepper.param_groups]
        for group in groups:
            group["params"] = [p for p in group["params"] if self._owners[p] == self._rank]
        self.stepper.param_groups = [group for group in groups if group["params"]]
        try:
            yield bool(self.stepper.param_groups)
        finally:
            self.stepper.param_groups = groups
            for group, whole in zip(groups, params, strict=True):
                group["params"] = whole

    def _exchange(self) -> None:
        """Gather each parameter from its owner."""
        by_dtype: dict[torch.dtype, list[list[Tensor]]] = {}
        for parameter in self._parameters():
            if parameter.requires_grad or parameter.grad is not None:
                plain = torch.view_as_real(parameter) if parameter.is_complex() else parameter
                parts = by_dtype.setdefault(plain.dtype, [[] for _ in range(self._world)])
                parts[self._owners[parameter]].append(plain.detach())
        for parts in by_dtype.values():
            sizes = [sum(map(Tensor.numel, part)) for part in parts]
            first = next(filter(None, parts))[0]
            whole = first.new_empty(self._world, max(sizes))
            own = first.new_empty(max(sizes))
            if parts[self._rank]:
                torch.cat([each.flatten() for each in parts[self._rank]], out=own[: sizes[self._rank]])
            dist.all_gather_into_tensor(whole.view(-1), own)
            targets, sources = [], []
            for rank, (part, row, size) in enumerate(zip(parts, whole, sizes, strict=True)):
                if rank != self._rank and part:
                    pieces = row[:size].split([*map(Tensor.numel, part)])
                    targets += part
                    sources += [piece.view(each.shape) for piece, each in zip(pieces, part, strict=True)]
            if targets:
                torch._foreach_copy_(targets, sources)

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the state of all ranks on the rank ``to``, whose next `state_dict` returns it. All ranks call this.

        A rank sends one parameter's state at a time, so that the state of all parameters is on the host only.
        """
        own = self.stepper.state_dict()
        state: dict[Any, Any] = {key: value for key, value in own["state"].items() if not isinstance(key, int)}
        for index, parameter in enumerate(self._parameters()):
            owner = self._owners[parameter]
            box = [_on_host(own["state"].get(index))]
            if owner != to and self._rank == owner:
                dist.send_object_list(box, dst=to)
            elif owner != to and self._rank == to:
                dist.recv_object_list(box, src=owner)
            if box[0] is not None:
                state[index] = box[0]
        self._consolidated = {**own, "state": state} if self._rank == to else None

    @override
    def state_dict(self) -> dict[str, Any]:
        consolidated, self._consolidated = self._consolidated, None
        return self.stepper.state_dict() if consolidated is None else consolidated

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's part of a whole state dict."""
        owners = [self._owners[parameter] for parameter in self._parameters()]
        kept = {
            key: value
            for key, value in state_dict["state"].items()
            if not isinstance(key, int) or owners[key] == self._rank
        }
        self.stepper.load_state_dict({**state_dict, "state": kept})


def _on_host(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, Mapping):
        return {key: _on_host(each) for key, each in value.items()}
    return type(value)(map(_on_host, value)) if type(value) in (list, tuple) else value
