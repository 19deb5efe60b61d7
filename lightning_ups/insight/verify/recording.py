"""Recording of what each block computes in a step, from the inputs and gradients of the reference training.

Rounding errors grow from block to block and would hide a fault. Therefore each block gets its input, and in backward
the gradient of its output, from the reference, so that a difference belongs to that block. Custom operators do this, so
that the graph of a compiled model does not break.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.hooks import RemovableHandle

from lightning_ups._compat.torch.tensors.custom_ops import define_operator
from lightning_ups._compat.torch.tensors.tensors import whole_of
from lightning_ups.insight.verify.comparison import REST, BlockStep, Step, sampled

Place = tuple[int, int, str]  # the step, the call of the block in it, the block


class Tape:
    """The recorded inputs of blocks and gradients of their outputs, on the CPU."""

    def __init__(self) -> None:
        self.inputs: dict[Place, Tensor] = {}
        self.gradients: dict[Place, Tensor] = {}


class Watch:
    """Records the steps of a model by hooks, which run outside of compiled forwards.

    Args:
        model: The model.
        blocks: Its blocks by name.
        tape: The inputs and gradients that blocks get; if it is empty, theirs are recorded in it.
    """

    def __init__(self, model: nn.Module, blocks: Mapping[str, nn.Module], tape: Tape) -> None:
        self.steps: list[Step] = []
        self._model, self._blocks, self._tape = model, blocks, tape
        self._records = not tape.inputs
        self._homes = {p: name for name, block in reversed([*blocks.items()]) for p in block.parameters()}
        self._begin()
        self._handles: list[RemovableHandle] = []
        for name, block in blocks.items():
            self._handles += [
                block.register_forward_pre_hook(_before(name), with_kwargs=True),
                block.register_forward_hook(_after(name), with_kwargs=True),
            ]
        _OPEN.append(self)

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        if self in _OPEN:
            _OPEN.remove(self)

    def note_gradients(self, gradient: Callable[[nn.Parameter], Tensor | None]) -> None:
        """Record a step, given a function that returns the gradient of a parameter."""
        gradients: dict[str, list[Tensor]] = {name: [] for name in (*self._blocks, REST)}
        for _, p in sorted(
            self._model.named_parameters(), key=lambda item: item[0]
        ):  # sharding may register them in another order
            if p.requires_grad:
                found = gradient(p)
                gradients[self._homes.get(p, REST)].append(whole_of(found) if found is not None else torch.zeros(1))
        for name, of_block in gradients.items():
            _note(self._step.blocks.setdefault(name, BlockStep()), of_block)
        # In the order of the model, parameters outside of blocks last.
        self._step.blocks = {name: self._step.blocks[name] for name in gradients}
        self._step.norm = sum(block.norm**2 for block in self._step.blocks.values()) ** 0.5
        self.steps.append(self._step)
        self._begin()

    def note_loss(self, loss: float) -> None:
        """Record the loss of the last step."""
        if self.steps:
            self.steps[-1].loss = loss

    def _begin(self) -> None:
        self._step = Step()
        self._calls: dict[str, int] = {}
        self._awaited: dict[str, list[Place]] = {}  # calls whose backward has not run

    def take_input(self, x: Tensor, name: str) -> Tensor:
        """Record the input of a block, and return the one that it gets, in new memory."""
        self._calls[name] = self._calls.get(name, -1) + 1
        place = (len(self.steps), self._calls[name], name)
        self._awaited.setdefault(name, []).append(place)
        if self._is_first(name):
            self._step.blocks.setdefault(name, BlockStep()).given = sampled(x)
        if self._records:
            self._tape.inputs[place] = x.detach().cpu()
        forced = self._tape.inputs.get(place)
        return x.clone() if self._records or forced is None else torch.empty_like(x).copy_(forced)

    def take_output(self, y: Tensor, x: Tensor, name: str) -> None:
        """Record the output of a block."""
        if self._is_first(name):
            self._step.blocks[name].added = sampled(y.float() - x.float() if y.shape == x.shape else y)

    def _is_first(self, name: str) -> bool:
        # If blocks run several times, later inputs come from their own outputs.
        return self._calls.get(name) == 0

    def take_passed(self, gradient: Tensor, name: str) -> None:
        """Record the gradient of a block's input."""
        self._step.blocks.setdefault(name, BlockStep()).passed = sampled(gradient)

    def take_gradient(self, gradient: Tensor, name: str) -> Tensor:
        """Return the gradient of its output that a block gets, in new memory."""
        place = self._awaited[name].pop() if self._awaited.get(name) else None
        if self._records and place is not None:
            self._tape.gradients[place] = gradient.detach().cpu()
        recorded = None if self._records or place is None else self._tape.gradients.get(place)
        return gradient.clone() if recorded is None else torch.empty_like(gradient).copy_(recorded)


_OPEN: list[Watch] = []  # the last one records: a compiled graph has only names, and may be older


def _before(name: str) -> Callable[..., Any]:
    def hook(_: nn.Module, args: Any, kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        index = _first(leaves)
        if index is None or not torch.is_grad_enabled():
            return None
        leaves[index] = watched_input(leaves[index], name)
        return tree_unflatten(leaves, spec)

    return hook


def _after(name: str) -> Callable[..., Any]:
    def hook(_: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        given = tree_leaves((args, kwargs))
        leaves, spec = tree_flatten(output)
        index, of_input = _first(leaves), _first(given)
        if index is None or of_input is None or not torch.is_grad_enabled():
            return None
        leaves[index] = watched_output(leaves[index], given[of_input], name)
        return tree_unflatten(leaves, spec)

    return hook


def _input(x: Tensor, block: str) -> Tensor:
    return _OPEN[-1].take_input(x, block) if _OPEN else x.clone()


def _output(y: Tensor, x: Tensor, block: str) -> Tensor:
    if _OPEN:
        _OPEN[-1].take_output(y, x, block)
    return y.clone()


def _passed(gradient: Tensor, block: str) -> Tensor:
    if _OPEN:
        _OPEN[-1].take_passed(gradient, block)
    return gradient.clone()


def _gradient(gradient: Tensor, block: str) -> Tensor:
    return _OPEN[-1].take_gradient(gradient, block) if _OPEN else gradient.clone()


def _empty_like_first(first: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(first)


def _keep_block(ctx: Any, inputs: tuple[Any, ...], _: Any) -> None:
    ctx.block = inputs[-1]


watched_passed = define_operator(_passed, name="watched_passed", fake=_empty_like_first)
watched_gradient = define_operator(_gradient, name="watched_gradient", fake=_empty_like_first)
watched_input = define_operator(
    _input,
    name="watched_input",
    fake=_empty_like_first,
    keep=_keep_block,
    differentiate=lambda ctx, gradient: (watched_passed(gradient, ctx.block), None),
)
watched_output = define_operator(
    _output,
    name="watched_output",
    fake=_empty_like_first,
    keep=_keep_block,
    differentiate=lambda ctx, gradient: (watched_gradient(gradient, ctx.block), None, None),
)


def _first(leaves: Iterable[Any]) -> int | None:
    return next((i for i, t in enumerate(leaves) if isinstance(t, Tensor) and t.is_floating_point()), None)


def _note(block: BlockStep, gradients: Iterable[Tensor]) -> None:
    gradients = [*gradients]
    if gradients:
        norms = torch.stack([gradient.float().norm().cpu() for gradient in gradients])
        block.gradient, block.norm = torch.cat([sampled(gradient) for gradient in gradients]), norms.norm().item()
