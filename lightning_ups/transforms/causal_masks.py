"""Lets compiled models of transformers leave out the masks that they leave out uncompiled."""

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

from torch import nn
from torch.compiler import is_compiling

from lightning_ups._compat.optional.transformers import TRACED, masks_depend_on_positions, skipping_masks
from lightning_ups.transforms.forward import Forward, replaced_forward

# How a model of transformers makes positions that never start again within a row.
_OWN_POSITIONS = re.compile(r"if position_ids is None:\s(?:.*\n){0,3}?\s+position_ids = torch\.arange\(")


@contextmanager
def causal_masks_left_out(module: nn.Module) -> Iterator[None]:
    """Let models of transformers below ``module`` pass no causal mask while they are compiled in this context.

    They pass none uncompiled if nothing is padded or packed, and kernels of flash attention take none. Compiled, they
    cannot look at the positions, which start again where documents are packed, and pass a mask to be safe. Here they
    pass none if they made the positions themselves.
    """
    with ExitStack() as undo:
        if models := masks_depend_on_positions(module):
            undo.enter_context(skipping_masks())
        for model in models:
            kind = type(model)
            undo.enter_context(
                replaced_forward(model, _noting(_place_of_positions(kind) if _makes_own(kind) else None))
            )
        yield


@cache
def _makes_own(kind: type[nn.Module]) -> bool:
    if not kind.__module__.startswith("transformers."):  # a class of a user may change them afterwards
        return False
    try:
        return _OWN_POSITIONS.search(inspect.getsource(kind.forward)) is not None
    except (OSError, TypeError):  # no source
        return False


@cache
def _place_of_positions(kind: type[nn.Module]) -> int:
    return [*inspect.signature(kind.forward).parameters].index("position_ids") - 1


@cache  # equal models share a compilation, so their forwards must be the same function
def _noting(place: int | None) -> Callable[[Forward], Forward]:
    @cache
    def noting(inner: Forward) -> Forward:
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not is_compiling():
                return inner(self, *args, **kwargs)
            outer = TRACED.makes_positions
            TRACED.makes_positions = place is not None and len(args) <= place and kwargs.get("position_ids") is None
            try:
                return inner(self, *args, **kwargs)
            finally:
                TRACED.makes_positions = outer

        return forward

    return noting
