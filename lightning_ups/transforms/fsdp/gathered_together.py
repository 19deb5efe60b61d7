"""Finds which sharded modules are gathered together: those inside of a compiled block with the block."""

from contextlib import ExitStack
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_ups._compat.torch.fsdp.state import gathered_with
from lightning_ups.transforms.compile import is_compiled

__all__ = ["gather_with_blocks", "gathered_when_called", "sharded_in"]


def gathered_when_called(root: FSDPModule) -> dict[nn.Module, list[FSDPModule]]:
    """Return, for each module below ``root`` whose call gathers, all sharded modules that are gathered with it."""
    below = [module for module in sharded_in(root) if module is not root]
    together = {block: sharded_in(block) for block in below if is_compiled(block)}  # type: ignore[arg-type]
    within = {inner for block, found in together.items() for inner in found if inner is not block}
    return {module: together.get(module, [module]) for module in below if module not in within}  # type: ignore[misc]


def gather_with_blocks(root: FSDPModule, undo: ExitStack) -> None:
    """Gather modules inside of compiled blocks of ``root``, such as a float32 part, with the block, until ``undo``.

    A hook inside of a block would break its graph.
    """
    for block, found in gathered_when_called(root).items():
        for inner in found:
            if inner is not block:
                undo.enter_context(gathered_with(block, inner))


def sharded_in(module: Any) -> list[FSDPModule]:
    """Return the sharded modules in ``module``, including itself."""
    return [inner for inner in module.modules() if isinstance(inner, FSDPModule)]
