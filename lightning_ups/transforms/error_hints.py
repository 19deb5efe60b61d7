"""Adds hints to errors of a training step whose own text does not say what to do."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_ups.transforms.quoted import first_line

__all__ = [
    "advice_on_mixed_types",
    "explaining_reads",
    "explaining_shards_read",
    "explaining_torch_func",
    "explaining_types",
    "float32_for",
    "note_no_kernel",
    "note_second_backward",
    "note_shards",
]

_OF_TWO_TYPES = ("same dtype", "expected scalar type", "should be the same")  # torch's texts for products of two dtypes
_OF_NO_KERNEL = ("unsupported dtype", "not implemented for", "expected both inputs to be")
_OF_WHAT_WAS_FREED = ("out of bounds for storage of size 0", "but its data is not allocated yet")
# Texts of torch and Transformer Engine for either.
_OF_TYPES = ("dtype", "scalar type", "scalartype", "bias type", "bfloat16")


@contextmanager
def explaining_reads(step: str, *, param_dtype: torch.dtype | None) -> Iterator[None]:
    """Explain errors of ``step`` of a sharded model that are caused by shards or by the dtype of gathered weights.

    Args:
        step: The name of the step.
        param_dtype: The dtype in which modules compute; None: that of the parameters.

    Raises:
        RuntimeError: If the step fails for such a reason.
    """
    try:
        yield
    except RuntimeError as error:
        said = first_line(error)
        if error.__cause__ is None and "mixed torch.Tensor and DTensor" in said:
            raise RuntimeError(
                f"{step} reads a parameter outside the forward of its module, which it did not do the first time:"
                f" {said}."
                " What the first step reads so is found, and gathered for every step; this one was not."
                " Call the module and not a method of it, or name the parameters:"
                " FSDP2Strategy(outside=['encoder.*.weight'])."
            ) from error
        if any(words in said for words in _OF_WHAT_WAS_FREED):
            raise RuntimeError(
                f"{step} uses gathered parameters after they were freed: {said}."
                " FSDP2 gathers them for a backward where it finds what a module returns: in tensors, containers and"
                " objects that have tensors as attributes; and a second backward through one graph (retain_graph=True)"
                " may come after they are freed."
                " Return tensors, or use strategy='ddp'."
            ) from error
        if (text := _about_types(step, said, error, param_dtype)) is not None:
            raise RuntimeError(text) from error
        _explain_shards_differentiated(step, said, error)
        raise


@contextmanager
def explaining_types(step: str, *, param_dtype: torch.dtype | None) -> Iterator[None]:
    """Explain errors of ``step`` of a sharded model that are caused by the dtype of gathered weights.

    Args:
        step: The name of the step.
        param_dtype: The dtype in which modules compute; None: that of the parameters.

    Raises:
        RuntimeError: If the step fails for such a reason.
    """
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
            " What a forward computes with is gathered, and a parameter that the step gets hold of outside of that is a"
            " shard; allow_unused=True would give None for it."
            " Where gradients of parameters balance losses, use strategy='ddp', or take those of what a module returns."
        ) from error


def _about_types(step: str, said: str, error: BaseException, param_dtype: torch.dtype | None) -> str | None:
    if param_dtype is None:
        return None
    if any(words in said for words in _OF_TWO_TYPES) and "is read outside" not in said:
        return (
            f"{step} computes with tensors of two types: {said}."
            f" Under this precision weights are gathered as {param_dtype}, and what is given to blocks and roots is"
            " cast to it; a tensor that a forward makes in another type is not."
            " Use BF16Precision(), whose autocast casts where an operator needs it."
            f" Or cast it there, as in x.to(self.weight.dtype), or {float32_for(error)}; if it is given to a module"
            " that is not among the blocks, name that in blocks=[...]."
        )
    low = str(param_dtype).removeprefix("torch.")
    if low in said.lower() and any(words in said.lower() for words in _OF_NO_KERNEL):
        return (
            f"{step} meets an operator that does not take {param_dtype}: {said}."
            f" Under this precision weights are gathered as {param_dtype}, and what is given to blocks and roots is"
            " cast to it."
            f" Cast it there, as in x.float(), or {float32_for(error)}."
        )
    return None


@contextmanager
def explaining_shards_read(step: str) -> Iterator[None]:
    """Explain errors of ``step`` that are caused by computing with shards from ``parameters()``.

    Args:
        step: The name of the step.

    Raises:
        RuntimeError: If the step fails for this reason.
    """
    try:
        yield
    except RuntimeError as error:  # also NotImplementedError
        said = first_line(error)
        _explain_shards_differentiated(step, said, error)
        if error.__cause__ is not None or not any(words in said for words in ("DTensor", "sharding strategy")):
            raise  # already explained, or about something else
        raise RuntimeError(
            f"{step} computes with shards where whole tensors are meant: {said}."
            " parameters() and named_parameters() give shards, within a step too; what is read by its name, as in"
            " self.net.weight, is gathered."
            " Read each so: getattr(module, name) for module in self.modules()"
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
                "met an operator that does not take it. Some, as Fourier transforms, know no such type."
                if any(words in str(error).lower() for words in _OF_NO_KERNEL)
                else "met a tensor of another type."
                " Code that mixes float32 tensors of its own into a forward needs autocast."
            )
            error.add_note(
                f"The module computes with weights of low precision, without autocast, and {why}"
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
            f"Under {strategy} parameters and gradients are shards outside of a step: each device has a part (DTensor)."
            " tensor.full_tensor() is the whole one, if every device calls it: outside of what rank zero does alone."
            " Set values before they are sharded, in __init__ or configure_model, and copy modules there;"
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
    """Add a hint to ``error`` if none of the allowed attention kernels supports a call.

    Args:
        error: The error that ended the run.
        asked: The argument that allows the kernels, as it was given.
    """
    if isinstance(error, RuntimeError) and "No available kernel" in str(error):
        error.add_note(
            f"{asked} allows no other attention kernel, and none of these takes this call:"
            " by its device, types, sizes, mask or dropout."
            " Name one more, as in attention=['flash', 'math'], or use attention='auto'."
        )


def _ends_compiled(error: BaseException) -> bool:
    places = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(places) and "_aot_autograd" in places[-1]


@contextmanager
def explaining_torch_func(block: nn.Module, *, part: str) -> Iterator[None]:
    """Explain errors of ``block`` that are caused by its use of `torch.func`.

    Args:
        block: The block that runs.
        part: The name of the callback that has saved-tensor hooks on it.

    Raises:
        RuntimeError: If it fails for this reason.
    """
    try:
        yield
    except RuntimeError as error:
        if "support saved tensor hooks" not in str(error):
            raise
        raise RuntimeError(
            f"{type(block).__name__} differentiates by torch.func in its forward, as grad, vjp, jacrev and hessian do."
            f" {part} has hooks on what it saves for backward, and torch.func takes none."
            f" Name other blocks in {part}(blocks=[...]) or leave it out; torch.autograd.grad(..., create_graph=True)"
            " takes them."
        ) from error


def float32_for(error: BaseException) -> str:
    """Return the advice to compute the module in which ``error`` was raised in float32."""
    found = _module_of(error)
    if found is None:
        return "let that part compute in float32, with in_float32=[...] in the precision, as BF16Precision has it"
    name, module = found
    pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
    what = f"let {name} ({type(module).__name__}) compute in float32"
    return f"{what}, with in_float32=[{pattern!r}] in the precision, as BF16Precision has it"


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
