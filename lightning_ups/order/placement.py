"""Where a strategy keeps parameters, and who applies the declarations under it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy, Strategy

__all__ = ["Placement"]


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where a strategy keeps parameters, as far as the order must know.

    Args:
        name: The class of the strategy.
        shards: Whether parameters are split over devices.
        ours: Whether the strategy applies the declarations itself, before it shards; a class says so by
            ``applies_declarations = True``.
        whole_graph: Whether the strategy is code that must be compiled with the model, whole and without a break; a
            class says so by ``whole_graph = True``.
        settings: How it divides the module, under the names that YAML has for it; a strategy of ours says so by
            ``settings``, once it is made.
    """

    name: str
    shards: bool
    ours: bool
    whole_graph: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @classmethod
    def of(cls, strategy: Strategy | type[Strategy]) -> Self:
        """Return what ``strategy``, an instance or a class, does."""
        kind = strategy if isinstance(strategy, type) else type(strategy)
        stock_shards = issubclass(kind, (FSDPStrategy, ModelParallelStrategy, DeepSpeedStrategy))
        ours = getattr(kind, "applies_declarations", False)
        return cls(
            name=kind.__name__,
            shards=getattr(kind, "shards", stock_shards),
            ours=ours,
            whole_graph=getattr(kind, "whole_graph", False),
            settings=getattr(strategy, "settings", {}) if ours and strategy is not kind else {},
        )
