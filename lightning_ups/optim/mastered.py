"""An optimizer that steps the master weights behind a module."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any, NoReturn, SupportsIndex

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ups._compat.torch.optimizers import (
    closure_of,
    flag_to_skip,
    has_modes,
    hooked_once,
    needs_closure,
    share_state_dict_hooks,
)
from lightning_ups._compat.torch.tensors.autograd import has_values
from lightning_ups._compat.torch.tensors.tensors import count_writes
from lightning_ups.optim.adamw_step import OneKernel, Settings, gradient_column, one_kernel
from lightning_ups.optim.delegating import DelegatingOptimizer
from lightning_ups.optim.master_gradients import MasterGradients
from lightning_ups.optim.master_weights import MasterWeights


class MasteredOptimizer(DelegatingOptimizer):
    """Lets an optimizer step the masters, with the gradients of the low-precision parameters.

    It has the parameter groups of the optimizer that it wraps, in the same order and over the parameters that
    the module has, so that schedulers, clipping and names keep their meaning. Its state dict is that optimizer's own.

    Args:
        inner: An optimizer over the module's parameters. What state it has for them, it has for their masters from
            here on, in their type.
        accumulate: Add the gradients of microbatches in the type of the masters, as soon as each is whole. The
            parameters then have no ``.grad`` after a backward: the masters have it.
        wrapper: The data-parallel wrapper around the module, if there is one. Its reduction is then made in the type
            of the masters, and leaves the sum there.

    Raises:
        ValueError: If ``inner`` cannot step without a closure, or has modes to train and to evaluate in.
        RuntimeError: At its first step, if ``inner`` writes to no master, as one that lets another optimizer step.
    """

    def __init__(
        self,
        inner: Optimizer,
        masters: MasterWeights,
        *,
        accumulate: bool = False,
        wrapper: DistributedDataParallel | None = None,
    ) -> None:
        if needs_closure(inner):
            raise ValueError(_evaluates_anew(inner))
        if has_modes(inner):
            raise ValueError(
                f"{type(inner).__name__} has other weights for evaluation, which its train() and eval() put in place."
                " They would change the masters, and not the weights in which the module computes."
                " Set weights='autocast' in the precision."
            )
        self.inner, self.masters = inner, masters
        self.master_gradients = MasterGradients(
            masters, parameters=self._parameters, accumulate=accumulate, wrapper=wrapper
        )
        groups = [{**group, "params": [*group["params"]]} for group in inner.param_groups]
        self._coefficient: Tensor | None = None
        self._kernel, self._is_known_to_write = OneKernel(inner), False
        self._complete = False
        super().__init__(groups, inner.defaults)
        share_state_dict_hooks(self, inner)
        for group in inner.param_groups:
            group["params"] = [masters.of.get(p, p) for p in group["params"]]
        self._adopt_state()
        self._complete = True
        self.master_gradients.follow()

    @override
    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            f"A MasteredOptimizer over {type(self.inner).__name__} can be neither copied nor pickled."
            " It steps the masters behind a module's weights, and a copy of the module has none."
            " Make another optimizer over the copy's parameters and load this one's state_dict(), or copy undo()."
        )

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if self._complete:
            added = self.param_groups[-1]
            self.inner.add_param_group(self._over_masters(added))
            self.master_gradients.follow()

    @property
    @override
    def param_groups(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Groups like those of the wrapped optimizer, over the parameters that the module has."""
        return self._groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Put others in their place, as callbacks do that unfreeze parameters, when a run is resumed."""
        self._groups = value
        if self._complete:
            self.inner.param_groups = [self._over_masters(group) for group in value]
            self.master_gradients.follow()

    def _over_masters(self, group: Mapping[str, Any]) -> dict[str, Any]:
        return {**group, "params": [self.masters.of.get(p, p) for p in group["params"]]}

    def _adopt_state(self) -> None:
        # Some make it when they are made, such as Adagrad; and an optimizer may have made steps before this run.
        held: list[tuple[Any, Any]] = [*self.inner.state.items()]
        self.inner.state.clear()
        for parameter, state in held:  # in its own order, which its state dict has
            master: Any = self.masters.of.get(parameter, parameter)
            mastered = master is not parameter
            self.inner.state[master] = {k: self._widened(v, master) for k, v in state.items()} if mastered else state

    def _widened(self, value: Any, master: Tensor) -> Any:
        low = isinstance(value, Tensor) and value.dtype is self.masters.dtype
        return value.to(master.dtype) if low else value

    def take_clip_coefficient(self, coefficient: Tensor) -> None:
        """Multiply the gradients of the next step by ``coefficient``, in the pass that casts them."""
        self._coefficient = coefficient

    @override
    def delegate_step(self, loss: float | None, *, has_closure: bool) -> None:
        self.masters.take_over()
        self.prepare_step()
        parameters, masters = self._pairs()
        if (settings := self._one_kernel(parameters)) is not None:
            self._step_in_one_kernel(parameters, masters, settings)
        else:
            self._step_by_inner(_once(loss, self.inner) if has_closure else None)

    def prepare_step(self) -> None:
        """Let masters have the gradients, and the optimizer the options, that the next step uses."""
        self._hand_over_options()
        self.master_gradients.prepare_step()

    @property
    def in_one_kernel(self) -> bool:
        """Whether a step is one pass over the weights: `adamw_step.settings_of` says when."""
        return self._one_kernel(self._pairs()[0]) is not None

    def _one_kernel(self, copies: Iterable[nn.Parameter]) -> list[Settings] | None:
        return one_kernel(self.inner) if all(map(Tensor.is_contiguous, copies)) else None

    def _pairs(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Return the parameters that have masters, and those."""
        parameters = self._parameters()
        masters = [*map(self.masters.of.get, parameters)]
        mastered = [p for p, master in zip(parameters, masters, strict=True) if master is not None]
        return mastered, [master for master in masters if master is not None]

    def _step_in_one_kernel(
        self, parameters: Sequence[nn.Parameter], masters: Sequence[nn.Parameter], settings: Sequence[Settings]
    ) -> None:
        low = dict(zip(map(id, masters), parameters, strict=True))

        def copies(weights: list[Tensor]) -> list[Tensor | None]:
            return [*map(low.get, map(id, weights))]

        def gradients(weights: list[Tensor]) -> list[Tensor | None]:
            pairs = zip(gradient_column(weights), copies(weights), strict=True)
            return [copy.grad if wide is None and copy is not None else wide for wide, copy in pairs]

        with hooked_once(self.inner):
            self._kernel.step(self.inner, settings, coefficient=self._coefficient, gradients=gradients, copies=copies)
        self._coefficient = None
        self.master_gradients.spend(parameters, masters)
        self.masters.writes.note(parameters)

    def _step_by_inner(self, closure: Callable[[], Any] | None) -> None:
        self.master_gradients.hand_over()
        self._scale_gradients()
        with nullcontext() if self._is_known_to_write else self._seen_to_write():
            if closure is None or closure_of(self.inner) is None:
                self.inner.step()
            else:
                self.inner.step(closure)
        stepped = [p for p in self._mastered() if self.masters.of[p].grad is not None]
        self.masters.write(stepped)
        for parameter in stepped:
            self.masters.of[parameter].grad = None

    @contextmanager
    def _seen_to_write(self) -> Iterator[None]:
        given = [self.masters.of[p] for p in self._mastered() if self.masters.of[p].grad is not None]
        stands = all(group.get("lr") == 0 for group in self.param_groups)
        if stands or not given or not has_values(given[0]):
            yield
            return
        # Writes through `.data` are not counted: then there is state that was not there, or another value.
        counts, states = [count_writes(master) for master in given], len(self.inner.state)
        least = min(given, key=Tensor.numel)
        before = least.detach().clone()
        yield
        counted = counts != [count_writes(master) for master in given]
        self._is_known_to_write = counted or len(self.inner.state) > states or not torch.equal(least, before)
        if not self._is_known_to_write and not flag_to_skip(self.inner):
            raise RuntimeError(
                f"{type(self.inner).__name__} stepped and wrote to none of {len(given)} weights that have gradients."
                " They are masters, which its groups have in place of the module's parameters; it, or an optimizer"
                " inside it, keeps the parameters elsewhere. Set weights='autocast' in the precision."
            )

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        self.master_gradients.clear(to_none=set_to_none)
        super().zero_grad(set_to_none)

    @override
    def state_dict(self) -> dict[str, Any]:
        self._hand_over_options()
        return self.inner.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update({key: value for key, value in inner.items() if key != "params"})

    @property
    @override
    def state(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The state of the wrapped optimizer, by its master parameters."""
        return self.inner.state

    @state.setter
    def state(self, value: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Put other state in its place, as who begins anew does; what is given for a parameter is its master's."""
        if self._complete and value is not self.inner.state:  # ``Optimizer.__init__`` sets it too
            self.inner.state = defaultdict(dict, value)
            self._adopt_state()

    def undo(self) -> Optimizer:
        """Return the wrapped optimizer, over the module's parameters again and with its state."""
        self.master_gradients.stop()
        self._hand_over_options()
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            for parameter, master in zip(group["params"], inner["params"], strict=True):
                if master is not parameter and master in self.inner.state:
                    self.inner.state[parameter] = self.inner.state.pop(master)
            inner["params"] = [*group["params"]]
        return self.inner

    def gradients(self) -> Sequence[Tensor]:
        """Return the gradients that the next step will use, before any clipping."""
        return self.master_gradients.all()

    def _hand_over_options(self) -> None:
        # A scheduler writes into the groups it sees, which are these.
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update({key: value for key, value in group.items() if key != "params"})

    def _scale_gradients(self) -> None:
        coefficient, self._coefficient = self._coefficient, None
        if coefficient is None:
            return
        gradients = [p.grad for group in self.inner.param_groups for p in group["params"] if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, coefficient)

    def _mastered(self) -> list[nn.Parameter]:
        return self._pairs()[0]

    def _parameters(self) -> list[nn.Parameter]:
        return [*chain.from_iterable(group["params"] for group in self.param_groups)]


def _once(loss: Any, optimizer: Optimizer) -> Callable[[], Any]:
    """Return a closure that gives ``loss``, which has been computed, and refuses to compute it again."""
    left = [loss]

    def closure() -> Any:
        if not left:
            raise ValueError(_evaluates_anew(optimizer))
        return left.pop()

    return closure


def _evaluates_anew(optimizer: Optimizer) -> str:
    return (
        f"{type(optimizer).__name__} computes the loss again and again within one step, which masters have only once."
        " Set weights='autocast' in the precision."
    )
