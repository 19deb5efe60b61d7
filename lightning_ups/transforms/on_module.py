"""What was done to a module, kept by the module itself."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar
from weakref import ref

from torch import nn
from typing_extensions import override

__all__ = ["OnModule"]

T = TypeVar("T")


class OnModule(Generic[T]):
    """One value for each module, which goes when the module goes, and which a copy of the module does not have.

    The value may hold the module. In a ``WeakKeyDictionary`` such a module would live for ever.

    Args:
        name: Of what is kept, unlike that of anything else.
    """

    def __init__(self, name: str) -> None:
        self._name = f"_lightning_ups_{name}"

    def get(self, module: nn.Module) -> T | None:
        """Return what was kept for ``module``, or None."""
        kept = vars(module).get(self._name)
        return kept.value if kept is not None and kept.owner() is module else None  # a shallow copy has it too

    def keep(self, module: nn.Module, value: T) -> None:
        """Keep ``value``, in the place of any before."""
        vars(module)[self._name] = _Kept(ref(module), value)

    def drop(self, module: nn.Module) -> None:
        """Keep nothing for ``module`` any more."""
        vars(module).pop(self._name, None)


class _Kept:
    def __init__(self, owner: Callable[[], nn.Module | None], value: Any) -> None:
        self.owner, self.value = owner, value

    @override
    def __reduce__(self) -> Any:
        return _Kept, (_nobody, None)  # for a copy and for a file


def _nobody() -> None:
    """Return the owner of what a copy kept."""
