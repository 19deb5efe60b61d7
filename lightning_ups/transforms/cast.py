"""Casting what enters and leaves a module, where its weights have another type than the data."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

__all__ = ["cast_around"]


@contextmanager
def cast_around(
    modules: Iterable[nn.Module], *, inputs: torch.dtype | None, outputs: torch.dtype | None
) -> Iterator[None]:
    """Cast floating-point tensors on their way into and out of each of ``modules`` while the context is open.

    Tensors are found in any nesting of lists, dicts and the outputs of transformers. None leaves them as they are.
    The casts are hooks: they lie outside the forward, and so outside its compilation.
    """
    with ExitStack() as undo:
        for module in modules:
            before = module.register_forward_pre_hook(partial(_cast_inputs, inputs), with_kwargs=True)
            after = module.register_forward_hook(partial(_cast_outputs, outputs))
            undo.callback(before.remove)
            undo.callback(after.remove)
        yield


def _cast_inputs(dtype: torch.dtype | None, _: nn.Module, args: Any, kwargs: Any) -> Any:
    return _cast(args, dtype), _cast(kwargs, dtype)


def _cast_outputs(dtype: torch.dtype | None, _: nn.Module, __: Any, output: Any) -> Any:
    return _cast(output, dtype)


def _cast(tree: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return tree
    return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, tree)
