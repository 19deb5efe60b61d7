"""Taking down what each block does in a step, with the inputs and the gradients that it had in another training.

Errors of rounding grow from block to block until a fault would not stand out. So every block gets what it got in the
reference: its input, and in backward the gradient of its output. The block, all that was done to it, and all that is
between two blocks run as they would; what differs is theirs alone.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.hooks import RemovableHandle

from lightning_ups._compat.tensors import whole_of
from lightning_ups.transforms.verify import REST, BlockStep, Step, sampled

__all__ = ["Tape", "Watch"]

Place = tuple[int, int, str]  # the step, the call of the block in it, the block


class Tape:
    """The inputs of blocks and the gradients of their outputs, on the CPU."""

    def __init__(self) -> None:
        self.inputs: dict[Place, Tensor] = {}
        self.gradients: dict[Place, Tensor] = {}


class Watch:
    """Takes down steps of a model.

    Args:
        model: Its blocks' hooks run outside of what replaced their forwards, compiled code among it.
        blocks: The blocks by name.
        tape: What blocks get, or, if it is empty, what keeps what they get.
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
                block.register_forward_pre_hook(self._before(name), with_kwargs=True),
                block.register_forward_hook(self._after(name)),
            ]

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def note_gradients(self, gradient: Callable[[nn.Parameter], Tensor | None]) -> None:
        """Take down a step, of which ``gradient`` gives a parameter's gradient."""
        gradients: dict[str, list[Tensor]] = {name: [] for name in (*self._blocks, REST)}
        for _, p in sorted(
            self._model.named_parameters(), key=lambda item: item[0]
        ):  # sharding may register them in another order
            if p.requires_grad:
                found = gradient(p)
                gradients[self._homes.get(p, REST)].append(whole_of(found) if found is not None else torch.zeros(1))
        for name, of_block in gradients.items():
            _note(self._step.blocks.setdefault(name, BlockStep()), of_block)
        # In the order of the model, whatever the order in which blocks ran; what is in none comes last.
        self._step.blocks = {name: self._step.blocks[name] for name in gradients}
        self._step.norm = sum(block.norm**2 for block in self._step.blocks.values()) ** 0.5
        self.steps.append(self._step)
        self._begin()

    def note_loss(self, loss: float) -> None:
        """Take down the loss of the last step."""
        if self.steps:
            self.steps[-1].loss = loss

    def _begin(self) -> None:
        self._step = Step()
        self._calls: dict[str, int] = {}
        self._starts: dict[str, Tensor] = {}

    def _before(self, name: str) -> Callable[..., Any]:
        @torch.compiler.disable
        def hook(_: nn.Module, args: Any, kwargs: Any) -> Any:
            leaves, spec = tree_flatten((args, kwargs))
            index = _first(leaves)
            if index is None or not torch.is_grad_enabled():
                return None
            self._calls[name] = self._calls.get(name, -1) + 1
            place = (len(self.steps), self._calls[name], name)
            x = leaves[index]
            block = self._step.blocks.setdefault(name, BlockStep())
            block.given = sampled(x)
            if self._records:
                self._tape.inputs[place] = x.detach().cpu()
                forced = None
            else:
                forced = self._tape.inputs.get(place)
            leaves[index] = _Boundary.apply(x, forced, lambda gradient: _keep_passed(block, gradient))
            self._starts[name] = leaves[index].detach()
            return tree_unflatten(leaves, spec)

        return hook

    def _after(self, name: str) -> Callable[..., Any]:
        @torch.compiler.disable
        def hook(_: nn.Module, __: Any, output: Any) -> Any:
            leaves, spec = tree_flatten(output)
            index = _first(leaves)
            if index is None or not torch.is_grad_enabled() or name not in self._starts:
                return None
            y, x = leaves[index], self._starts[name]
            place = (len(self.steps), self._calls[name], name)
            self._step.blocks[name].added = sampled(y.float() - x.float() if y.shape == x.shape else y)
            leaves[index] = _Boundary.apply(y, None, lambda gradient: self._gradient(place, gradient))
            return tree_unflatten(leaves, spec)

        return hook

    def _gradient(self, place: Place, gradient: Tensor) -> Tensor:
        if self._records:
            self._tape.gradients[place] = gradient.detach().cpu()
            return gradient
        recorded = self._tape.gradients.get(place)
        return gradient if recorded is None else recorded.to(gradient.device, gradient.dtype)


class _Boundary(torch.autograd.Function):
    """Stands for its input with the value of another, and shows the gradient to a function that may change it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forced: Tensor | None, note: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.note = note
        return x.view_as(x) if forced is None else forced.to(x.device, x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.note(gradient), None, None


def _keep_passed(block: BlockStep, gradient: Tensor) -> Tensor:
    block.passed = sampled(gradient)
    return gradient


def _first(leaves: Iterable[Any]) -> int | None:
    return next((i for i, t in enumerate(leaves) if isinstance(t, Tensor) and t.is_floating_point()), None)


def _note(block: BlockStep, gradients: Iterable[Tensor]) -> None:
    gradients = [*gradients]
    if gradients:
        norms = torch.stack([gradient.float().norm().cpu() for gradient in gradients])
        block.gradient, block.norm = torch.cat([sampled(gradient) for gradient in gradients]), norms.norm().item()
