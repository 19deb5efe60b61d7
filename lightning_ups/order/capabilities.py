"""What strategies, precisions and callbacks say of themselves, for the order of changes and for refusals to read."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

from lightning.pytorch.plugins import MixedPrecision, Precision

from lightning_ups.order.policy import STOCK_POLICIES, DtypePolicy

__all__ = [
    "AppliesDeclarations",
    "Compilation",
    "HasCapabilities",
    "OnlyOne",
    "PrecisionCapabilities",
    "ReadsPastForward",
    "capabilities_of",
    "policy_of",
]


class AppliesDeclarations(ABC):
    """A strategy that applies all declared changes itself, before it shards.

    Attributes:
        shards: Parameters are split over devices.
        whole_graph: The strategy is code that must be compiled with the model, whole and without a graph break.
    """

    shards: ClassVar[bool]
    whole_graph: ClassVar[bool] = False

    @property
    @abstractmethod
    def settings(self) -> Mapping[str, Any]:
        """How it divides the module, under the names that YAML has for it."""


@dataclass(frozen=True, kw_only=True)
class PrecisionCapabilities:
    """What a precision does that others have to know.

    Args:
        wants_float8_gathers: The user asked that weights are gathered in float8.
        holds_masters: The module's weights are lower in precision than those that the optimizer steps.
        breaks_graphs: A compiled graph ends before each of its modules.
        excludes_compile: The argument that does not work in compiled code, or None.
        recomputes_itself: What ActivationCheckpoint recomputes goes through a function of its own.
        checkpoint: That function, once the module is converted.
    """

    wants_float8_gathers: bool = False
    holds_masters: bool = False
    breaks_graphs: bool = False
    excludes_compile: str | None = None
    recomputes_itself: bool = False
    checkpoint: Callable[..., Any] | None = None


class HasCapabilities(ABC):
    """A precision that states in which types it computes, and what else others have to know."""

    policy: DtypePolicy

    @property
    @abstractmethod
    def capabilities(self) -> PrecisionCapabilities:
        """What others have to know."""


def capabilities_of(precision: Precision) -> PrecisionCapabilities:
    """Return what ``precision`` states; a stock precision does nothing of it."""
    return precision.capabilities if isinstance(precision, HasCapabilities) else PrecisionCapabilities()


def policy_of(precision: Precision) -> DtypePolicy | None:
    """Return the policy of ``precision``, ours or stock; None if it cannot be expressed as one."""
    if isinstance(precision, HasCapabilities):
        return precision.policy
    # The class itself: a subclass inherits the name "32-true" and may do more than it says.
    return STOCK_POLICIES.get(precision.precision) if type(precision) in (Precision, MixedPrecision) else None


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """How a callback compiles.

    Args:
        backend: The compiler behind Dynamo.
        fullgraph: Graph breaks are errors.
        must_succeed: A block that does not compile is an error.
        blocks: Patterns of what is compiled. None: what repeats.
    """

    backend: str
    fullgraph: bool = False
    must_succeed: bool = True
    blocks: Sequence[str] | None = None


class OnlyOne:
    """A callback of which a Trainer can have one: it follows the whole run, and two would disturb each other."""


@runtime_checkable
class ReadsPastForward(Protocol):
    """A module that reads the weight of a submodule where the submodule's forward does not run."""

    @property
    def read_past_forward(self) -> Mapping[str, str]:
        """The setting that makes it do so, by the name of the submodule."""
        ...
