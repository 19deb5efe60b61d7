"""Handles gathers of parameters in a graph: groups them by block, and decides whether they are kept."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from torch import fx

from lightning_ups._compat.torch.fsdp.gathers import gathers, module_path, recompute, set_group, written

REST = "rest"  # of a root: parameters outside of its blocks


@dataclass(frozen=True)
class GatherPlan:
    """Prepares each captured graph of a model whose parameters are gathered when they are read.

    Args:
        blocks: The names of blocks, relative to their root, in a fixed order: the text of a plan is part of the key of
            inductor's cache, and the order of a set differs between processes.
        recompute: Whether the backward gathers again.
        key: Anything else that distinguishes models that must not share graphs.
        rules: A version number of the grouping: graphs on disk are found by the text of a plan.
    """

    blocks: tuple[str, ...]
    recompute: bool
    key: str = ""
    rules: int = 2

    @classmethod
    def of(cls, blocks: Iterable[str], roots: Iterable[str], *, recompute: bool, key: str = "") -> Self:
        """Return the plan for ``blocks`` inside ``roots``, both as full names."""
        roots = list(roots)
        inside = {block.removeprefix(f"{root}.") for block in blocks for root in roots if block.startswith(f"{root}.")}
        return cls(tuple(sorted(inside)), recompute, key)

    def __call__(self, graph: fx.GraphModule) -> str:
        """Mark the gathers of ``graph``, and return the names of their groups.

        Raises:
            RuntimeError: If the graph writes to a gathered parameter.
        """
        found = list(gathers(graph))
        groups = _by_runs(self._place(local) for _, local in found)
        # Backward begins with what forward ended with: gathering that again would free nothing, and could not overlap.
        kept = [whole.args[0] for (whole, _), group in zip(found, groups, strict=True) if _last(group, groups)]
        for (redistribute, local), group in zip(found, groups, strict=True):
            for node in (redistribute, local):
                set_group(node, group)
                if self.recompute and redistribute.args[0] not in kept:
                    recompute(node)
            if written(graph, local):
                where = (module_path(local) or ["the model"])[-1]
                raise RuntimeError(
                    f"{where} writes to a parameter within its forward, where it is a gathered copy: the write would be"
                    " lost. Write outside the step, such as in on_train_batch_end, or use FSDP2Strategy."
                )
        return ", ".join(str(redistribute.args[0]) for redistribute, _ in found)

    def _place(self, node: fx.Node) -> str:
        return next((path for path in module_path(node) if path in self.blocks), REST)


def _by_runs(places: Iterable[str]) -> list[str]:
    """Return a name for each run of equal ``places``: parameters that are read far apart form no group.

    If an embedding and a head were gathered together, every gather between them would start with theirs.
    """
    groups: list[str] = []
    runs: Counter[str] = Counter()
    before = None
    for place in places:
        runs[place] += place != before
        groups.append(place if runs[place] == 1 else f"{place}, {runs[place]}")
        before = place
    return groups


def _last(group: str, groups: list[str]) -> bool:
    return group == groups[-1] != groups[0]
