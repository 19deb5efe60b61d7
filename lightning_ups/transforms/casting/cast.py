"""Casting what enters and leaves a module, where its weights have another type than the data."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.hooks import RemovableHandle

__all__ = ["cast_around", "cast_tensors", "changed_tensors", "is_wide", "telling_rounded_losses"]


@contextmanager
def cast_around(
    modules: Iterable[nn.Module],
    *,
    inputs: torch.dtype | None,
    outputs: torch.dtype | None,
    given_as_is: Collection[nn.Module] = (),
) -> Iterator[None]:
    """Cast floating-point tensors on their way into and out of each of ``modules`` while the context is open.

    Tensors are found in any nesting of lists, dicts, dataclasses, packed sequences and the outputs of transformers.
    None leaves them as they are. The casts are hooks: they lie outside the forward, and so outside its compilation. A
    copy or a pickle of a module does not cast: nobody would end it there. One of them that lies within another one,
    under a second name, does not cast when that other one calls it. What is given to modules ``given_as_is`` is not
    cast, as where they compute in float32 and nothing may round before.
    """
    modules = [*modules]
    nested = _nested(modules)
    with ExitStack() as undo:
        for module in modules:
            around = [_Running() for _ in nested.get(module, ())]
            for running, outer in zip(around, nested.get(module, ()), strict=True):
                for handle in running.follow(outer):
                    undo.callback(handle.remove)
            before = _Cast(None if module in given_as_is else inputs, "inputs", around=around)
            after = _Cast(outputs, "outputs", around=around)
            before.handle = module.register_forward_pre_hook(before, with_kwargs=True)
            undo.callback(before.handle.remove)
            after.handle = module.register_forward_hook(after)
            undo.callback(after.handle.remove)
        yield


def _nested(modules: Sequence[nn.Module]) -> dict[nn.Module, list[nn.Module]]:
    """Return, of those that lie within others, these others."""
    inside = {outer: {*outer.modules()} - {outer} for outer in modules}
    found = {module: [outer for outer in modules if module in inside[outer]] for module in modules}
    return {module: outers for module, outers in found.items() if outers}


class _Running:
    """Whether a module runs."""

    def __init__(self) -> None:
        self.now = False

    def follow(self, module: nn.Module) -> Iterator[RemovableHandle]:
        """Hang hooks on ``module`` that keep this right, also after an exception."""
        yield module.register_forward_pre_hook(self.begin, prepend=True)
        yield module.register_forward_hook(self.end, always_call=True)

    def begin(self, *_: Any) -> None:
        self.now = True

    def end(self, *_: Any) -> None:
        self.now = False


class _Cast:
    """A hook whose copy does nothing, and takes itself off the copied module when that is first called."""

    def __init__(
        self, dtype: torch.dtype | None, what: Literal["inputs", "outputs"], *, around: Sequence[_Running] = ()
    ) -> None:
        self.dtype, self.what, self.around = dtype, what, around
        self.handle: RemovableHandle | None = None
        self.copied = False

    def __call__(self, module: nn.Module, args: Any, values: Any) -> Any:
        if self.copied:
            if not torch.compiler.is_compiling() and self.handle is not None:  # Dynamo cannot look at a handle
                self.handle.remove()
            return None
        if any(running.now for running in self.around):
            return None
        return cast_tensors(values if self.what == "outputs" else (args, values), self.dtype)

    def __getstate__(self) -> dict[str, Any]:
        # The handle's copy is one of the copied module's hooks.
        return {**vars(self), "copied": True}


def cast_tensors(tree: Any, dtype: torch.dtype | None) -> Any:
    """Return ``tree``, any nesting as `cast_around` says, with its floating-point tensors cast; None casts none."""
    if dtype is None:
        return tree
    return changed_tensors(tree, lambda t: t.to(dtype) if t.is_floating_point() else t)


def changed_tensors(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return ``tree``, any nesting as `cast_around` says, with what ``change`` makes of each of its tensors.

    It is ``tree`` itself where nothing changes: a module may write to what it is given.
    """
    before, spec = tree_flatten(tree)
    after = [_changed(leaf, change) for leaf in before]
    return tree if _are_same(after, before) else tree_unflatten(after, spec)


def _changed(leaf: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(leaf, Tensor):
        return change(leaf)
    if not is_dataclass(leaf) or isinstance(leaf, type | nn.Module):
        return leaf
    before = {field.name: getattr(leaf, field.name, None) for field in fields(leaf)}
    after = {name: changed_tensors(value, change) for name, value in before.items()}
    if _are_same([*after.values()], [*before.values()]):
        return leaf
    twin = copy(leaf)  # not a call of the class, which may compute fields by itself
    kind: Any = type(leaf)
    write = object.__setattr__ if kind.__dataclass_params__.frozen else setattr  # which a mapping follows
    for name, value in after.items():
        if value is not before[name]:
            write(twin, name, value)
    return twin


def _are_same(after: Sequence[Any], before: Sequence[Any]) -> bool:
    return all(new is old for new, old in zip(after, before, strict=True))


def is_wide(module: nn.Module) -> bool:
    """Return whether all weights of ``module`` are wider than float32: it is given, and returns, what it likes."""
    types = {p.dtype for p in module.parameters() if p.is_floating_point() or p.is_complex()}
    return bool(types) and all(dtype.itemsize > 4 for dtype in types)


@contextmanager
def telling_rounded_losses(
    modules: Iterable[nn.Module], *, dtype: torch.dtype, cure: str, tell: Callable[[str], Any]
) -> Iterator[None]:
    """Tell, once for each of ``modules`` while this is open, that it computes a loss in ``dtype`` itself.

    Args:
        modules: What is looked at in its first call with gradients: a loss is a number that it returns first, or so
            called.
        dtype: The low precision that it computes in.
        cure: What to do about it.
        tell: Gets the text.
    """
    with ExitStack() as undo:
        for module in modules:
            # Before what is returned is cast, by hooks that may have been there before.
            look = _Look(dtype, cure, tell)
            undo.callback(module.register_forward_hook(look, prepend=True).remove)
        yield


class _Look:
    """A hook that acts once; its copy does not."""

    def __init__(self, dtype: torch.dtype, cure: str, tell: Callable[[str], Any]) -> None:
        self.dtype, self.cure, self.tell, self.done = dtype, cure, tell, False

    def __call__(self, module: nn.Module, _: Any, values: Any) -> None:
        if self.done or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        self.done = True
        loss = _loss_of(values)
        if isinstance(loss, Tensor) and loss.dtype is self.dtype and loss.dim() == 0:
            self.tell(
                f"{type(module).__name__} computes its loss in {str(self.dtype).removeprefix('torch.')}, whose numbers"
                " have eight bits."
                " Its values go by steps of a hundredth or so, and its gradients are rounded more than others."
                f" {self.cure}"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "done": True}


def _loss_of(values: Any) -> Any:
    # The first of what is returned, or what is called so: a temperature, which comes after, is none.
    if isinstance(values, Mapping):
        return values.get("loss")
    return getattr(values, "loss", None) if is_dataclass(values) else next(iter(tree_leaves(values)), None)
