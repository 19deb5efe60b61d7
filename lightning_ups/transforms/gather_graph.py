"""What becomes of gathers of parameters in a graph: by which block they are grouped, and whether they are kept."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from torch import fx

from lightning_ups._compat.gathers import gathers, module_path, recompute, set_group, written

__all__ = ["GatherPlan"]

REST = "rest"  # of a root: what is in none of its blocks


@dataclass(frozen=True)
class GatherPlan:
    """Prepares each captured graph of a model whose parameters are gathered when they are read.

    Args:
        blocks: The names of blocks, relative to the root that they are in, in one order: the text of a plan is part of
            the key of inductor's cache, and a set's differs from process to process.
        recompute: Whether the backward gathers anew.
        key: Whatever else tells two models apart that may not share graphs.
    """

    blocks: tuple[str, ...]
    recompute: bool
    key: str = ""

    @classmethod
    def of(cls, blocks: Iterable[str], roots: Iterable[str], *, recompute: bool, key: str = "") -> Self:
        """Return the plan for ``blocks`` inside ``roots``, modules by their full names."""
        roots = list(roots)
        inside = {block.removeprefix(f"{root}.") for block in blocks for root in roots if block.startswith(f"{root}.")}
        return cls(tuple(sorted(inside)), recompute, key)

    def __call__(self, graph: fx.GraphModule) -> None:
        """Mark the gathers of ``graph``.

        Raises:
            RuntimeError: If it writes to what it gathered.
        """
        for redistribute, local in gathers(graph):
            group = self._group(local)
            for node in (redistribute, local):
                set_group(node, group)
                if self.recompute:
                    recompute(node)
            if written(graph, local):
                where = (module_path(local) or ["the model"])[-1]
                raise RuntimeError(
                    f"{where} writes to a parameter within its forward, where it is gathered from shards."
                    " The shards are what is trained and saved, and the write would be lost with the copy."
                    " Write outside the step, such as in on_train_batch_end, or use FSDP2Strategy."
                )

    def _group(self, node: fx.Node) -> str:
        return next((path for path in module_path(node) if path in self.blocks), REST)
