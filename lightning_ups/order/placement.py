"""Describes a strategy: whether it shards, and whether it applies declarations itself."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy, Strategy

from lightning_ups.order.capabilities import AppliesDeclarations

__all__ = ["Placement"]


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The properties of a strategy that the order of changes depends on.

    Args:
        name: The class of the strategy.
        shards: Whether parameters are split over devices.
        ours: Whether the strategy applies the declarations itself, before it shards.
        whole_graph: Whether the strategy must be compiled with the model, as one graph without graph breaks.
        settings: How a strategy of this package divides the module, with the names used in YAML.
    """

    name: str
    shards: bool
    ours: bool
    whole_graph: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @classmethod
    def of(cls, strategy: Strategy | type[Strategy]) -> Self:
        """Return the placement of ``strategy``, an instance or a class."""
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
