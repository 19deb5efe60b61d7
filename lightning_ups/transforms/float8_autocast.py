"""Refusing an autocast of the user's around what a precision has given its types already."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["refused_autocast"]


@contextmanager
def refused_autocast(modules: Iterable[nn.Module], *, by: str, cure: str) -> Iterator[None]:
    """Let a forward of one of ``modules`` raise if autocast is on, as long as this is open.

    Args:
        modules: Outermost modules: their hooks run outside of compiled code.
        by: Whose types an autocast would change.
        cure: What to do instead.
    """

    def check(module: nn.Module, _: Any) -> None:
        if any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda")):
            raise RuntimeError(
                f"{type(module).__name__} was called within torch.autocast, and {by} has set its types already."
                " A precision carries the whole policy; a second cast in every product would undo part of it."
                f" {cure}"
            )

    handles = [module.register_forward_pre_hook(check) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
