"""Gives gathered parameters the gradients of their shards, for manual steps with several backwards."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_ups._compat.torch.fsdp.state import held_parameters
from lightning_ups._compat.torch.tensors.autograd import hidden_from_dynamo, in_backward

__all__ = ["ShownGradients"]


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
