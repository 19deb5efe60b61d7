"""The model's own forward, in whose place a step runs; and what is gathered, and shown, within it."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_ups._compat.torch.fsdp.state import (
    begin_forward,
    end_forward,
    expect_backward,
    gathered_with,
    held_parameters,
    settle,
)
from lightning_ups._compat.torch.tensors.autograd import hidden_from_dynamo, in_backward
from lightning_ups.transforms.compile import is_compiled


class ModelForward:
    """Gathers the parameters of the model's own group from the start of a step to the end of its backward.

    Args:
        root: The sharded model.

    Attributes:
        is_gathered: Whether the forward has begun, and not ended.
        shown: Shows gradients to manual steps, if there are any.
    """

    def __init__(self, root: FSDPModule) -> None:
        self._root = root
        self.is_gathered = self._awaits_backward = False
        self.shown: ShownGradients | None = None

    def begin(self, *, shows_gradients: bool) -> None:
        """Gather the group."""
        if self._awaits_backward:
            self.settle()  # the last forward had no backward
        begin_forward(self._root)
        self.is_gathered = self._awaits_backward = True
        if shows_gradients and self.shown is not None:
            self.shown.show(self._root)  # type: ignore[arg-type]

    def end(self) -> None:
        """End the forward, as a call of the model would."""
        if self.shown is not None:
            self.shown.hide_all()
        if self.is_gathered:
            end_forward(self._root)
            self.is_gathered = False

    def begin_backward(self, loss: Tensor) -> None:
        """Prepare the reduction of the group in the backward from ``loss``."""
        expect_backward(self._root, loss)

    def end_backward(self) -> None:
        """Record that a backward has freed the gathered parameters."""
        self._awaits_backward = False

    def settle(self) -> None:
        """Reshard all groups, if no backward does."""
        settle(self._root)
        self.is_gathered = self._awaits_backward = False


def gathered_when_called(root: FSDPModule) -> dict[nn.Module, list[FSDPModule]]:
    """Return, for each module below ``root`` whose call gathers, all sharded modules that are gathered with it."""
    below = [module for module in sharded_in(root) if module is not root]
    together = {block: sharded_in(block) for block in below if is_compiled(block)}  # type: ignore[arg-type]
    within = {inner for block, found in together.items() for inner in found if inner is not block}
    return {module: together.get(module, [module]) for module in below if module not in within}  # type: ignore[misc]


def gather_with_blocks(root: FSDPModule, undo: ExitStack) -> None:
    """Gather modules inside of compiled blocks of ``root``, such as a float32 part, with the block, until ``undo``.

    A hook inside of a block would break its graph.
    """
    for block, found in gathered_when_called(root).items():
        for inner in found:
            if inner is not block:
                undo.enter_context(gathered_with(block, inner))


def sharded_in(module: Any) -> list[FSDPModule]:
    """Return the sharded modules in ``module``, including itself."""
    return [inner for inner in module.modules() if isinstance(inner, FSDPModule)]


_AUTOGRADS: Any = Tensor.grad  # where autograd stores a gradient, and FSDP2 looks for it


class _Gathered(nn.Parameter):
    """A gathered parameter that shows the gradient of its shard to user code; autograd has a separate one."""

    shard: Tensor

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        return _AUTOGRADS.__get__(self) if in_backward() else self.shard.grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:  # type: ignore[override]
        if in_backward():
            _AUTOGRADS.__set__(self, value)
        else:
            self.shard.grad = value


class ShownGradients:
    """Lets gathered parameters show the gradients of their shards; writes to these take effect.

    Not while autograd runs, which uses the gradients of gathered parameters, and not within the forward of the module
    that gathers them, so that compiled code sees only one kind of parameter.

    Args:
        root: The sharded model.
        when: Whether a module's parameters show gradients after its forward; otherwise a backward recomputes.
        undo: Ends it.
    """

    def __init__(self, root: FSDPModule, *, when: Callable[[], bool], undo: ExitStack) -> None:
        self._held: dict[nn.Module, list[Any]] = {}
        for home, *_, handle in held_parameters(root):
            self._held.setdefault(home, []).append(handle)

        def before(module: nn.Module, *_: Any) -> None:
            self.hide(module)

        def after(module: nn.Module, *_: Any) -> None:
            if when():
                self.show(module)

        undo.callback(self.hide_all)
        for module in root.modules():  # type: ignore[attr-defined]
            if isinstance(module, FSDPModule) and module is not root:
                undo.callback(module.register_forward_pre_hook(hidden_from_dynamo(before)).remove)  # type: ignore[attr-defined]
                undo.callback(module.register_forward_hook(hidden_from_dynamo(after)).remove)  # type: ignore[attr-defined]

    def show(self, module: nn.Module) -> None:
        """Begin with the parameters that ``module`` itself gathers."""
        for held in self._held.get(module, ()):
            gathered = getattr(held, "_unsharded_param", None)
            if type(gathered) is nn.Parameter:  # a tensor-parallel one has another class, and is not changed
                gathered.__class__, gathered.shard = _Gathered, held.sharded_param  # type: ignore[attr-defined]

    def hide(self, module: nn.Module) -> None:
        """End for the parameters that ``module`` itself gathers."""
        for held in self._held.get(module, ()):
            gathered = getattr(held, "_unsharded_param", None)
            if isinstance(gathered, _Gathered):
                del gathered.shard
                gathered.__class__ = nn.Parameter  # type: ignore[assignment]

    def hide_all(self) -> None:
        """End for all."""
        for module in self._held:
            self.hide(module)
