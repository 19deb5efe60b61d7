"""Casts inputs and outputs of modules: to the dtype of their weights, or to float32 while the rest computes in less."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import copy
from dataclasses import fields, is_dataclass
from functools import lru_cache, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.hooks import RemovableHandle

from lightning_ups.transforms.blocks import select_blocks
from lightning_ups.transforms.forward import Forward, replaced_forward

_LOW = (torch.bfloat16, torch.float16)


@contextmanager
def cast_around(
    modules: Iterable[nn.Module],
    *,
    inputs: torch.dtype | None,
    outputs: torch.dtype | None,
    given_as_is: Collection[nn.Module] = (),
) -> Iterator[None]:
    """Cast floating-point inputs and outputs of each of ``modules`` while the context is open.

    Tensors are found in any nesting of lists, dicts, dataclasses, packed sequences and the outputs of transformers.
    None does not cast. The casts are hooks, so they are outside of the forward and of its compilation. Copies and
    pickles of a module do not cast. A module that is inside another of ``modules``, under a second name, does not cast
    when the outer one calls it. Inputs of modules ``given_as_is`` are not cast, for example because they compute in
    float32 and nothing may round first.
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
    """Return, for each module that is inside of others, those others."""
    inside = {outer: {*outer.modules()} - {outer} for outer in modules}
    found = {module: [outer for outer in modules if module in inside[outer]] for module in modules}
    return {module: outers for module, outers in found.items() if outers}


class _Running:
    """Whether a module is running."""

    def __init__(self) -> None:
        self.now = False

    def follow(self, module: nn.Module) -> Iterator[RemovableHandle]:
        """Register hooks on ``module`` that track this, also after an exception."""
        yield module.register_forward_pre_hook(self.begin, prepend=True)
        yield module.register_forward_hook(self.end, always_call=True)

    def begin(self, *_: Any) -> None:
        self.now = True

    def end(self, *_: Any) -> None:
        self.now = False


class _Cast:
    """A hook. Its copy does nothing, and removes itself from the copied module when it is first called."""

    def __init__(
        self, dtype: torch.dtype | None, what: Literal["inputs", "outputs"], *, around: Sequence[_Running] = ()
    ) -> None:
        self.dtype, self.what, self.around = dtype, what, around
        self.handle: RemovableHandle | None = None
        self.copied = False

    def __call__(self, module: nn.Module, args: Any, values: Any) -> Any:
        if self.copied:
            if not torch.compiler.is_compiling() and self.handle is not None:  # Dynamo cannot trace a handle
                self.handle.remove()
            return None
        if any(running.now for running in self.around):
            return None
        return cast_tensors(values if self.what == "outputs" else (args, values), self.dtype)

    def __getstate__(self) -> dict[str, Any]:
        # The copy of the handle belongs to the copied module's hooks.
        return {**vars(self), "copied": True}


def cast_tensors(tree: Any, dtype: torch.dtype | None) -> Any:
    """Return ``tree``, nested as in `cast_around`, with its floating-point tensors cast; None does not cast."""
    if dtype is None:
        return tree
    return _changed_tensors(tree, lambda t: t.to(dtype) if t.is_floating_point() else t)


def _changed_tensors(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return ``tree``, nested as in `cast_around`, with ``change`` applied to each of its tensors.

    If nothing changes, it is ``tree`` itself, because a module may write to its inputs.
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
    after = {name: _changed_tensors(value, change) for name, value in before.items()}
    if _are_same([*after.values()], [*before.values()]):
        return leaf
    twin = copy(leaf)  # not a call of the class, which may compute fields itself
    kind: Any = type(leaf)
    write = object.__setattr__ if kind.__dataclass_params__.frozen else setattr  # a mapping follows it
    for name, value in after.items():
        if value is not before[name]:
            write(twin, name, value)
    return twin


def _are_same(after: Sequence[Any], before: Sequence[Any]) -> bool:
    return all(new is old for new, old in zip(after, before, strict=True))


def is_wide(module: nn.Module) -> bool:
    """Return whether all weights of ``module`` are wider than float32: its inputs and outputs are not cast."""
    types = {p.dtype for p in module.parameters() if p.is_floating_point() or p.is_complex()}
    return bool(types) and all(dtype.itemsize > 4 for dtype in types)


@contextmanager
def telling_rounded_losses(
    modules: Iterable[nn.Module], *, dtype: torch.dtype, cure: str, tell: Callable[[str], Any]
) -> Iterator[None]:
    """Report, once for each of ``modules`` while the context is open, that it computes a loss in ``dtype``.

    Args:
        modules: Checked in their first call with gradients: the loss is the first output if that is a scalar, or the
            output named ``loss``.
        dtype: The low precision in which they compute.
        cure: What to do about it.
        tell: Called with the text.
    """
    with ExitStack() as undo:
        for module in modules:
            # Before outputs are cast, by hooks that may already exist.
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
                f" have eight bits, in steps of about a hundredth. {self.cure}"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "done": True}


def _loss_of(values: Any) -> Any:
    # The first output, or the output of that name; a later scalar, such as a temperature, is no loss.
    if isinstance(values, Mapping):
        return values.get("loss")
    return getattr(values, "loss", None) if is_dataclass(values) else next(iter(tree_leaves(values)), None)


def kept_in_float32(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """Return the submodules of ``model`` that match ``patterns``, without those inside of another match.

    Raises:
        ValueError: If a pattern matches no module that is called, or if a match shares a parameter with another module.
    """
    if not patterns:
        return {}
    named = select_blocks(model, patterns)
    inner = {part for module in named.values() for part in module.modules() if part is not module}
    kept = {name: module for name, module in named.items() if module not in inner}
    _refuse_tied(model, kept)
    return kept


def within(kept: Iterable[nn.Module]) -> set[nn.Module]:
    """Return ``kept`` and all modules inside of them."""
    return {part for module in kept for part in module.modules()}


@contextmanager
def computing_in_float32(modules: Iterable[nn.Module], *, outputs: torch.dtype | None) -> Iterator[None]:
    """Cast the inputs of ``modules`` to float32, and their outputs to ``outputs`` if given, inside the context.

    Half-precision tensors among the arguments are cast, in any nesting; other dtypes, including complex ones, are not.
    Autocast is off inside. Parameters are not cast here.
    """
    with ExitStack() as undo:
        for module in modules:
            undo.enter_context(replaced_forward(module, partial(_in_float32, outputs=outputs)))
        yield


@lru_cache(maxsize=256)  # equal modules get the same function, and therefore share a compilation
def _in_float32(inner: Forward, *, outputs: torch.dtype | None) -> Forward:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = _changed_tensors((args, kwargs), _raised)
        with torch.autocast("cpu", enabled=False), _no_autocast_on_gpus():
            result = inner(self, *args, **kwargs)
        if outputs is None:
            return result
        return _changed_tensors(result, lambda t: t.to(outputs) if t.dtype is torch.float32 else t)

    return forward


def _no_autocast_on_gpus() -> AbstractContextManager[Any]:
    return torch.autocast("cuda", enabled=False) if torch.cuda.is_available() else nullcontext()  # else torch warns


def _raised(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _LOW else tensor


def _refuse_tied(model: nn.Module, kept: Mapping[str, nn.Module]) -> None:
    inside = within(kept.values())
    outer = {p: name for name, m in model.named_modules() if m not in inside for p in m.parameters(recurse=False)}
    for name, module in kept.items():
        for own, parameter in module.named_parameters():
            if parameter in outer:
                raise ValueError(
                    f"{name}.{own} is also a parameter of {outer[parameter] or type(model).__name__!r}, but only"
                    f" {name} should compute in float32."
                    " A shared weight has one dtype."
                    " Name both in in_float32, or neither."
                )
