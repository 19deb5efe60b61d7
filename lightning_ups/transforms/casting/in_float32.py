"""Submodules that compute in float32 while the rest computes in a lower precision."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ups.transforms.blocks import select_blocks
from lightning_ups.transforms.casting.cast import changed_tensors
from lightning_ups.transforms.forward import Forward, replaced_forward

__all__ = ["computing_in_float32", "kept_in_float32", "within"]

_LOW = (torch.bfloat16, torch.float16)


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
        args, kwargs = changed_tensors((args, kwargs), _raised)
        with torch.autocast("cpu", enabled=False), _no_autocast_on_gpus():
            result = inner(self, *args, **kwargs)
        if outputs is None:
            return result
        return changed_tensors(result, lambda t: t.to(outputs) if t.dtype is torch.float32 else t)

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
