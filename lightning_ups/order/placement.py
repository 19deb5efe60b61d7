"""Where a strategy keeps parameters, and who applies the declarations under it."""

from dataclasses import dataclass
from typing import Self

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
    """

    name: str
    shards: bool
    ours: bool
    whole_graph: bool = False

    @classmethod
    def of(cls, strategy: Strategy | type[Strategy]) -> Self:
        """Return what ``strategy``, an instance or a class, does."""
        kind = strategy if isinstance(strategy, type) else type(strategy)
        stock_shards = issubclass(kind, (FSDPStrategy, ModelParallelStrategy, DeepSpeedStrategy))
        return cls(
            name=kind.__name__,
            shards=getattr(kind, "shards", stock_shards),
            ours=getattr(kind, "applies_declarations", False),
            whole_graph=getattr(kind, "whole_graph", False),
        )
