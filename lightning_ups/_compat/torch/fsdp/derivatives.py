"""Derivatives of derivatives under FSDP2, which by itself frees in the first backward what the second needs."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from lightning_ups._compat.patches import GROUP, STATE, installed
from lightning_ups._compat.torch.tensors.autograd import hidden_from_dynamo

__all__ = ["keep_for_derivatives"]

_Mark = tuple[int, int] | None


def keep_for_derivatives(states: Sequence[Any], groups: Sequence[Any]) -> Callable[[], None]:
    """Let what is gathered stay so once a backward made a graph (``create_graph``), until one that makes none ends.

    That one is the loss's, and at its end all groups are reduced: before, gradients may come to any of them. A backward
    that makes a graph and brings gradients to parameters is one of a loss, too.

    Args:
        states: Those below one root.
        groups: Of these.

    Returns:
        A function that ends the keeping, where no such backward comes.
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
        self._before: list[_Mark] | None = None  # of the gradients, while a backward runs that makes a graph

    def stop(self) -> None:
        self._on, self._before = False, None

    def begin(self, pre_backward: Callable[[Any], Any], gradient: Any) -> Any:
        if self._before is None and torch.is_grad_enabled():  # in a hook: as the backward runs
            self._on, self._before = True, self._marks()
        return pre_backward(gradient)

    def end(self, final: Callable[[], None], context: Any) -> None:
        before, self._before = self._before, None
        if before is not None and before == self._marks():
            # The groups stay as they are within a backward, for those that come.
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
