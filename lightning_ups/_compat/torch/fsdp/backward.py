"""FSDP2 in backward: higher derivatives, and tensors in objects that modules return."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_ups._compat.patches import GROUP, STATE, installed
from lightning_ups._compat.torch.tensors.autograd import hidden_from_dynamo

_Mark = tuple[int, int] | None


def keep_for_derivatives(states: Sequence[Any], groups: Sequence[Any]) -> Callable[[], None]:
    """Keep parameters gathered once a backward created a graph (``create_graph``), until one without it ends.

    The latter is the loss's backward, and at its end all groups are reduced: before, any of them may receive gradients.
    A backward that creates a graph and gives gradients to parameters is a loss's backward, too.

    Args:
        states: All states below one root.
        groups: Their groups.

    Returns:
        A function that ends this if no such backward follows.
    """
    kept = _Kept(groups)
    for state in states:
        _install(f"{STATE}._pre_backward", state, lambda stock: partial(kept.begin, stock))
        _install(
            f"{STATE}._root_post_backward_final_callback",
            state,
            lambda stock, context=state._state_ctx: partial(kept.end, stock, context),
        )
    for group in groups:
        for name in ("reshard", "post_backward"):
            _install(f"{GROUP}.{name}", group, lambda stock: partial(kept.unless_on, stock))
    return kept.stop


def _install(target: str, owner: Any, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    installed(target, owner, lambda stock: hidden_from_dynamo(make(stock)))


class _Kept:
    def __init__(self, groups: Sequence[Any]) -> None:
        self._groups = groups
        self._on = False
        self._before: list[_Mark] | None = None  # of the gradients, during a backward that creates a graph

    def stop(self) -> None:
        self._on, self._before = False, None

    def begin(self, pre_backward: Callable[[Any], Any], gradient: Any) -> Any:
        if self._before is None and torch.is_grad_enabled():  # in a hook: the mode in which the backward runs
            self._on, self._before = True, self._marks()
        return pre_backward(gradient)

    def end(self, final: Callable[[], None], context: Any) -> None:
        before, self._before = self._before, None
        if before is not None and before == self._marks():
            # The groups do not change within a backward, for later ones.
            context.post_backward_final_callback_queued = False
            context.iter_forward_root = None
        else:
            self._on = False
            final()

    def unless_on(self, function: Callable[..., None], *args: Any) -> None:
        if not self._on:
            function(*args)

    def _marks(self) -> list[_Mark]:
        gathered = (getattr(held, "_unsharded_param", None) for group in self._groups for held in group.fsdp_params)
        gradients = (None if parameter is None else parameter.grad for parameter in gathered)
        return [None if gradient is None else (id(gradient), gradient._version) for gradient in gradients]


_PLAIN = (type(None), bool, int, float, complex, str, bytes, type, torch.dtype, torch.device, nn.Module)
_DEPTH = 4  # a graph of PyTorch Geometric keeps its tensors in a mapping of a store


def find_in_objects(state: Any) -> None:
    """Let ``state`` also gather for the backward of attributes of returned objects, and of views changed in place."""
    warnings.filterwarnings(
        "ignore", message="FSDP2-wrapped module .* returned a view tensor"
    )  # which is no fault then
    target = f"{STATE}._register_pre_backward_hook"
    installed(target, state, lambda stock: hidden_from_dynamo(partial(_register, state, stock)))


def _register(state: Any, register: Callable[[Any], Any], output: Any) -> Any:
    result = register(output)
    if torch.is_grad_enabled():
        leaves = tree_leaves(result)
        for tensor in _in_objects(leaves):
            tensor.register_hook(state._pre_backward)
            _follow_base(state, tensor)
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                _follow_base(state, leaf)
    return result


def _follow_base(state: Any, view: Tensor) -> None:
    """Let ``state`` gather in the backward of the base of ``view`` if an operator changes the view in place.

    Such an operator gives the view another node of the graph, without the hooks of the first.
    """
    base = view._base
    if base is None or base.grad_fn is None:
        return
    has_gathered: list[bool] = []
    view.register_hook(lambda _: has_gathered.append(True))
    base.register_hook(lambda gradient: None if has_gathered else state._pre_backward(gradient))


def _in_objects(leaves: Sequence[Any]) -> Iterator[Tensor]:
    """Yield the tensors that need gradients in those of ``leaves`` that are objects, each once."""
    seen: set[int] = set()
    level = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
    for _ in range(_DEPTH):
        objects = [value for value in level if not isinstance(value, _PLAIN) and id(value) not in seen]
        seen.update(map(id, objects))
        level = [leaf for value in objects for leaf in tree_leaves(_attributes(value))]
        for leaf in level:
            if isinstance(leaf, Tensor) and leaf.requires_grad and id(leaf) not in seen:
                seen.add(id(leaf))
                yield leaf
        level = [leaf for leaf in level if not isinstance(leaf, Tensor)]


def _attributes(value: Any) -> dict[str, Any]:
    slots = (name for base in type(value).__mro__ for name in vars(base).get("__slots__", ()))
    return {**getattr(value, "__dict__", {}), **{name: getattr(value, name, None) for name in slots}}
