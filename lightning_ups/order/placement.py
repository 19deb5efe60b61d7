"""Where a strategy keeps parameters, and who applies the declarations under it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy, Strategy

from lightning_ups.order.capabilities import AppliesDeclarations

__all__ = ["Placement"]


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where a strategy keeps parameters, as far as the order must know.

    Args:
        name: The class of the strategy.
        shards: Whether parameters are split over devices.
        ours: Whether the strategy applies the declarations itself, before it shards.
        whole_graph: Whether the strategy is code that must be compiled with the model, whole and without a break.
        settings: How a strategy of ours divides the module, under the names that YAML has for it.
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
        if not issubclass(kind, AppliesDeclarations):
            shards = issubclass(kind, (FSDPStrategy, ModelParallelStrategy, DeepSpeedStrategy))
            return cls(name=kind.__name__, shards=shards, ours=False)
        return cls(
            name=kind.__name__,
            shards=kind.shards,
            ours=True,
            whole_graph=kind.whole_graph,
            settings=strategy.settings if isinstance(strategy, AppliesDeclarations) else {},
        )
