"""Adds hints to errors of a training step whose own text does not say what to do."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_ups.transforms.quoted import first_line

_OF_TWO_TYPES = ("same dtype", "expected scalar type", "should be the same")  # torch's texts for products of two dtypes
_OF_NO_KERNEL = ("unsupported dtype", "not implemented for", "expected both inputs to be")
_OF_WHAT_WAS_FREED = ("out of bounds for storage of size 0", "but its data is not allocated yet")
# Texts of torch and Transformer Engine for either.
_OF_TYPES = ("dtype", "scalar type", "scalartype", "bias type", "bfloat16")


@contextmanager
def explaining_reads(step: str, *, param_dtype: torch.dtype | None) -> Iterator[None]:
    """Explain errors of ``step`` of a sharded model that are caused by shards or by the dtype of gathered weights."""
    try:
        yield
    except RuntimeError as error:
        said = first_line(error)
        if error.__cause__ is None and "mixed torch.Tensor and DTensor" in said:
            raise RuntimeError(
                f"{step} reads a parameter outside the forward of its module, which the first step did not do:"
                f" {said}. Call the module instead of a method of it, or name the parameters:"
                " FSDP2Strategy(outside=['encoder.*.weight'])."
            ) from error
        if any(words in said for words in _OF_WHAT_WAS_FREED):
            raise RuntimeError(
                f"{step} uses gathered parameters after they were freed: {said}."
                " A module must return tensors, containers of them, or objects with tensors as attributes, and a graph"
                " has one backward. Return tensors, or use strategy='ddp'."
            ) from error
        if (text := _about_types(step, said, error, param_dtype)) is not None:
            raise RuntimeError(text) from error
        _explain_shards_differentiated(step, said, error)
        raise


@contextmanager
def explaining_types(step: str, *, param_dtype: torch.dtype | None) -> Iterator[None]:
    """Explain errors of ``step`` of a sharded model that are caused by the dtype of gathered weights."""
    try:
        yield
    except RuntimeError as error:
        # Without the advice about code that no compiler supports.
        said = first_line(error).partition(". Something in it is beyond")[0]
        if (text := _about_types(step, said, error, param_dtype)) is not None:
            raise RuntimeError(text) from error
        raise


def _explain_shards_differentiated(step: str, said: str, error: BaseException) -> None:
    if error.__cause__ is None and "appears to not have been used in the graph" in said:
        raise RuntimeError(
            f"{step} asks torch.autograd.grad for a gradient that the graph does not have: {said}."
            " A parameter read outside of a forward is a shard, which is not in the graph."
            " To balance losses by gradients of parameters, use strategy='ddp', or gradients of a module's output."
        ) from error


def _about_types(step: str, said: str, error: BaseException, param_dtype: torch.dtype | None) -> str | None:
    if param_dtype is None:
        return None
    if any(words in said for words in _OF_TWO_TYPES) and "is read outside" not in said:
        return (
            f"{step} computes with tensors of two dtypes: {said}."
            f" This precision gathers weights as {param_dtype} and casts the inputs of blocks and roots, but not"
            " tensors that a forward creates. Use BF16Precision(), whose autocast casts if an operator needs it."
            f" Or cast the tensor, as in x.to(self.weight.dtype), or {float32_for(error)}; if it is an input of a"
            " module that is not among the blocks, name that module in blocks=[...]."
        )
    low = str(param_dtype).removeprefix("torch.")
    if low in said.lower() and any(words in said.lower() for words in _OF_NO_KERNEL):
        return (
            f"{step} calls an operator that does not support {param_dtype}: {said}."
            f" Cast the tensor there, as in x.float(), or {float32_for(error)}."
        )
    return None


@contextmanager
def explaining_shards_read(step: str) -> Iterator[None]:
    """Explain errors of ``step`` that are caused by computing with shards from ``parameters()``."""
    try:
        yield
    except RuntimeError as error:  # also NotImplementedError
        said = first_line(error)
        _explain_shards_differentiated(step, said, error)
        if error.__cause__ is not None or not any(words in said for words in ("DTensor", "sharding strategy")):
            raise  # already explained, or about something else
        raise RuntimeError(
            f"{step} computes with shards instead of whole tensors: {said}."
            " parameters() and named_parameters() return shards, also within a step; parameters read by name, as in"
            " self.net.weight, are gathered."
            " Read each by name: getattr(module, name) for module in self.modules()"
            " for name, _ in module.named_parameters(recurse=False). Or use FSDP2Strategy."
        ) from error


@contextmanager
def advice_on_mixed_types(cure: str, *, in_float32: bool = False) -> Iterator[None]:
    """Explain dtype errors, with ``cure`` or the advice to compute that part in float32."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError) as error:
        if any(words in str(error).lower() for words in _OF_TYPES):
            why = (
                "called an operator that does not support it. Some, such as Fourier transforms, have no such dtype."
                if any(words in str(error).lower() for words in _OF_NO_KERNEL)
                else "used a tensor of another dtype."
                " Code that uses its own float32 tensors in a forward needs autocast."
            )
            error.add_note(
                f"The module computes with low-precision weights, without autocast, and {why}"
                f" {cure}{f', or {float32_for(error)}' if in_float32 else ''}."
            )
        raise


_OF_SHARDS = ("DTensor", "supported for tensor subclasses", "FSDP does not support deepcopy")


def note_shards(error: BaseException, *, strategy: str) -> None:
    """Add a hint to ``error`` if code outside of a step used a shard like a whole tensor."""
    if error.__cause__ is not None or getattr(error, "__notes__", None):
        return  # already explained
    if isinstance(error, (RuntimeError, TypeError, AssertionError)) and any(word in str(error) for word in _OF_SHARDS):
        error.add_note(
            f"Under {strategy}, parameters and gradients are shards (DTensor) outside of a step: each rank has a part."
            " tensor.full_tensor() returns the whole tensor; every rank must call it, not only rank 0."
            " Set values and copy modules before sharding, in __init__ or configure_model;"
            " later: tensor.copy_(torch.distributed.tensor.distribute_tensor(values, tensor.device_mesh,"
            " tensor.placements))."
        )


_OF_A_SECOND_BACKWARD = {
    "compiled": ("donated buffers", "does not currently support double backward"),
    "selective": ("Trying to backward an extra time",),
}


def note_second_backward(error: BaseException, *, kind: Literal["compiled", "selective"], cure: str) -> None:
    """Add an explanation and ``cure`` to ``error`` if a graph of this kind was differentiated twice."""
    known = any(words in str(error) for words in _OF_A_SECOND_BACKWARD[kind])
    # One graph for what were two in eager code, one of which already had its backward.
    shared = kind == "compiled" and "backward through the graph a second time" in str(error) and _ends_compiled(error)
    if isinstance(error, RuntimeError) and (known or shared):
        error.add_note(
            "The gradient of a gradient was asked for (create_graph=True, as in gradient penalties and physics-informed"
            " losses), or a second backward through one graph (retain_graph=True)."
            f" {cure}"
        )


def note_no_kernel(error: BaseException, *, asked: str) -> None:
    """Add a hint to ``error`` if no kernel supports a call of those that the argument ``asked`` allows."""
    if isinstance(error, RuntimeError) and "No available kernel" in str(error):
        error.add_note(
            f"{asked} allows no other attention kernel, and none of these supports this call,"
            " because of its device, dtypes, sizes, mask or dropout."
            " Name one more, as in attention=['flash', 'math'], or use attention='auto'."
        )


def _ends_compiled(error: BaseException) -> bool:
    places = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(places) and "_aot_autograd" in places[-1]


@contextmanager
def explaining_torch_func(block: nn.Module, *, part: str) -> Iterator[None]:
    """Explain errors of ``block``, which has saved-tensor hooks of ``part``, if `torch.func` in it causes them."""
    try:
        yield
    except RuntimeError as error:
        if "support saved tensor hooks" not in str(error):
            raise
        raise RuntimeError(
            f"{type(block).__name__} uses torch.func (grad, vjp, jacrev, hessian ...) in its forward."
            f" {part} has saved-tensor hooks on it, which torch.func does not support."
            f" Name other blocks in {part}(blocks=[...]), leave it out, or use"
            " torch.autograd.grad(..., create_graph=True)."
        ) from error


def float32_for(error: BaseException) -> str:
    """Return the advice to compute the module in which ``error`` was raised in float32."""
    found = _module_of(error)
    if found is None:
        return "let that part compute in float32, with in_float32=[...] of a precision such as BF16Precision"
    name, module = found
    pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
    what = f"let {name} ({type(module).__name__}) compute in float32"
    return f"{what}, with in_float32=[{pattern!r}] of a precision such as BF16Precision"


@contextmanager
def keeping_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt if torch raises another error while it cleans up after one.

    Ctrl-C between two statements of torch, such as entering and recording a dispatch mode, makes its cleanup fail:
    "trying to pop from empty mode stack".
    """
    try:
        yield
    except Exception as error:
        if (interrupt := _interrupt_behind(error)) is None:
            raise
        raise KeyboardInterrupt(*interrupt.args) from error


def _interrupt_behind(error: BaseException) -> KeyboardInterrupt | None:
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    if not str(frame.f_globals.get("__name__")).startswith("torch."):
        return None  # raised deliberately by user code
    behind = error.__context__
    while behind is not None and not isinstance(behind, KeyboardInterrupt):
        behind = behind.__context__
    return behind


def _module_of(error: BaseException) -> tuple[str, nn.Module] | None:
    """Return the innermost module in whose forward ``error`` was raised, preferably not one of torch's."""
    running, trace = [], error.__traceback__
    while trace is not None:
        running.append(trace.tb_frame.f_locals.get("self"))
        trace = trace.tb_next
    modules = [m for m in running if isinstance(m, nn.Module) and not isinstance(m, DistributedDataParallel)]
    if not modules:
        return None
    names = {module: name for name, module in modules[0].named_modules() if name}
    inside = [module for module in modules if module in names]
    chosen = [module for module in inside if not type(module).__module__.startswith("torch.nn.")] or inside
    return (names[chosen[-1]], chosen[-1]) if chosen else None
