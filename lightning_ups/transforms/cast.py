"""Casting what enters and leaves a module, where its weights have another type than the data."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

__all__ = ["cast_around"]


@contextmanager
def cast_around(
    modules: Iterable[nn.Module], *, inputs: torch.dtype | None, outputs: torch.dtype | None
) -> Iterator[None]:
    """Cast floating-point tensors on their way into and out of each of ``modules`` while the context is open.

    Tensors are found in any nesting of lists, dicts and the outputs of transformers. None leaves them as they are.
    The casts are hooks: they lie outside the forward, and so outside its compilation. A copy or a pickle of a module
    does not cast: nobody would end it there.
    """
    with ExitStack() as undo:
        for module in modules:
            before, after = _Cast(inputs, "inputs"), _Cast(outputs, "outputs")
            before.handle = module.register_forward_pre_hook(before, with_kwargs=True)
            undo.callback(before.handle.remove)
            after.handle = module.register_forward_hook(after)
            undo.callback(after.handle.remove)
        yield


class _Cast:
    """A hook whose copy does nothing, and takes itself off the copied module when that is first called."""

    def __init__(self, dtype: torch.dtype | None, what: Literal["inputs", "outputs"]) -> None:
        self.dtype, self.what = dtype, what
        self.handle: RemovableHandle | None = None
        self.copied = False

    def __call__(self, module: nn.Module, args: Any, values: Any) -> Any:
        if self.copied:
            if not torch.compiler.is_compiling() and self.handle is not None:  # Dynamo cannot look at a handle
                self.handle.remove()
            return None
        return (
            _cast(values, self.dtype)
            if self.what == "outputs"
            else (_cast(args, self.dtype), _cast(values, self.dtype))
        )

    def __getstate__(self) -> dict[str, Any]:
        # The handle's copy is one of the copied module's hooks.
        return {**vars(self), "copied": True}


def _cast(tree: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return tree
    return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, tree)
