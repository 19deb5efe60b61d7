"""Dtypes and other properties of strategies, precisions and callbacks, which the applier and the refusals read."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn, Protocol, runtime_checkable

import torch
from lightning.pytorch.plugins import MixedPrecision, Precision

from lightning_ups.transforms.blocks import as_patterns


@dataclass(frozen=True, kw_only=True)
class DtypePolicy:
    """The dtypes of computation. Parameters and optimizer state keep their dtypes. None: unchanged.

    Args:
        param: The dtype in which modules compute.
        reduce: The dtype in which gradients are reduced over devices.
        output: The dtype of a root's outputs, and therefore of a loss that is computed outside of it.
        in_float32: Patterns of submodules that compute in float32 anyway.
        autocast: Each operator chooses its dtype, as under ``torch.autocast``: matrix products and convolutions use
            ``param``, everything else keeps the dtype of its inputs. If False, whole modules compute in ``param``.
    """

    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    output: torch.dtype | None = None
    in_float32: tuple[str, ...] = ()
    autocast: bool = False

    @classmethod
    def bf16_mixed(cls, *, in_float32: Sequence[str] = (), autocast: bool = False) -> "DtypePolicy":
        """Return the policy of Lightning's ``"bf16-mixed"``, except for submodules that compute ``in_float32``."""
        return cls(
            param=torch.bfloat16,
            reduce=torch.float32,
            output=torch.float32,  # autocast runs losses in float32, whatever their inputs
            in_float32=as_patterns(in_float32),
            autocast=autocast,
        )


STOCK_POLICIES: dict[str, DtypePolicy] = {
    "32-true": DtypePolicy(),
    "bf16-mixed": DtypePolicy.bf16_mixed(autocast=True),
}


class AppliesDeclarations(ABC):
    """A strategy that applies all declared changes itself, before it shards.

    Attributes:
        shards: Parameters are split over devices.
        whole_graph: The strategy must be compiled with the model, as one graph without graph breaks.
    """

    shards: ClassVar[bool]
    whole_graph: ClassVar[bool] = False

    @property
    @abstractmethod
    def settings(self) -> Mapping[str, Any]:
        """How it divides the module, with the names used in YAML."""


@dataclass(frozen=True, kw_only=True)
class PrecisionCapabilities:
    """Properties of a precision that other parts read.

    Args:
        wants_float8_gathers: The user asked that weights are gathered in float8.
        holds_masters: The optimizer steps master weights of higher precision than the module's weights.
        breaks_graphs: Its modules cause graph breaks.
        excludes_compile: The argument that does not work in compiled code, or None.
        recomputes_itself: ActivationCheckpoint must recompute with ``checkpoint``.
        checkpoint: The precision's own checkpoint function, available once the module is converted.
    """

    wants_float8_gathers: bool = False
    holds_masters: bool = False
    breaks_graphs: bool = False
    excludes_compile: str | None = None
    recomputes_itself: bool = False
    checkpoint: Callable[..., Any] | None = None


class HasCapabilities(ABC):
    """A precision that states its dtypes and capabilities."""

    policy: DtypePolicy

    @property
    @abstractmethod
    def capabilities(self) -> PrecisionCapabilities:
        """Properties that other parts read."""


def capabilities_of(precision: Precision) -> PrecisionCapabilities:
    """Return the capabilities of ``precision``; a stock precision has the defaults."""
    return precision.capabilities if isinstance(precision, HasCapabilities) else PrecisionCapabilities()


def policy_of(precision: Precision) -> DtypePolicy | None:
    """Return the dtype policy of ``precision``, or None if it cannot be expressed as one."""
    if isinstance(precision, HasCapabilities):
        return precision.policy
    # Exact classes only: a subclass inherits the name "32-true" and may do something else.
    return STOCK_POLICIES.get(precision.precision) if type(precision) in (Precision, MixedPrecision) else None


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """How a callback compiles.

    Args:
        backend: The compiler behind Dynamo.
        fullgraph: Graph breaks are errors.
        must_succeed: A block that does not compile is an error.
        blocks: Patterns of the compiled modules. None: the blocks that repeat.
    """

    backend: str
    fullgraph: bool = False
    must_succeed: bool = True
    blocks: Sequence[str] | None = None


class _StateKey:
    """The property `Callback.state_key` with a hint: a Trainer reads it of a class that is given without brackets."""

    def __init__(self, owner: type) -> None:
        self._owner = owner

    def __get__(self, callback: Any, kind: type) -> str:
        if callback is None:
            name = kind.__name__
            raise AttributeError(f"{name} is given without brackets. Write Trainer(callbacks=[{name}(...)]).")
        return super(self._owner, callback).state_key  # type: ignore[attr-defined]


class TrainerOnly:
    """A callback that Fabric refuses: Fabric accepts any object as a callback, and calls none of its Trainer hooks."""

    in_fabric: ClassVar[str] = "Leave it out, or train with a Trainer."

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "state_key" not in vars(cls):
            cls.state_key = _StateKey(cls)  # type: ignore[attr-defined]

    def on_after_setup(self, fabric: object, module: object) -> NoReturn:
        """Called by `Fabric.setup`, and never by a Trainer.

        Raises:
            TypeError: Always.
        """
        name = type(self).__name__
        raise TypeError(f"{name} is a callback for a Trainer, and has no effect in Fabric. {self.in_fabric}")


class OnlyOne(TrainerOnly):
    """A callback that a Trainer can have only once, because it follows the whole run."""

    captures_step: ClassVar[bool] = False  # replays a training step as one CUDA graph


@runtime_checkable
class ReadsPastForward(Protocol):
    """A module that reads the weight of a submodule without calling that submodule's forward."""

    @property
    def read_past_forward(self) -> Mapping[str, str]:
        """Maps the name of each such submodule to the setting that causes it."""
        ...
