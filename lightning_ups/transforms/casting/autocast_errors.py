"""Raises if the user opens an autocast around modules whose dtypes a precision has already set."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_ups.transforms.blocks import roots

__all__ = ["refused_autocast"]


@contextmanager
def refused_autocast(module: nn.Module, *, by: str, choice: bool) -> Iterator[None]:
    """Make forwards within ``module`` raise if autocast is on, while the context is open. Copies do not raise.

    Args:
        module: Its roots are watched: their hooks run outside of compiled code.
        by: The precision that sets the dtypes.
        choice: Whether that precision can use autocast instead.
    """
    cure = "Take the autocast out" + (", or set weights='autocast' in the precision." if choice else ".")
    checks = []
    for _, root in roots(module):
        check = _Check(by, cure)
        check.handle = root.register_forward_pre_hook(check)
        checks.append(check)
    try:
        yield
    finally:
        for check in checks:
            check.handle.remove()


class _Check:
    """A hook. Its copy does nothing, and removes itself from the copied module when it is first called."""

    handle: RemovableHandle

    def __init__(self, by: str, cure: str) -> None:
        self.by, self.cure, self.copied = by, cure, False

    def __call__(self, module: nn.Module, _: Any) -> None:
        if self.copied:
            if not torch.compiler.is_compiling():  # Dynamo cannot trace a handle
                self.handle.remove()
        elif any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda")):
            raise RuntimeError(
                f"{type(module).__name__} was called within torch.autocast, but {self.by} has already set its dtypes."
                " A second cast in every product would undo part of the precision's policy."
                f" {self.cure}"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "copied": True}
