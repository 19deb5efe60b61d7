"""Values stored on a module."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar
from weakref import ref

from torch import nn
from typing_extensions import override

T = TypeVar("T")


class OnModule(Generic[T]):
    """One value per module, which is freed with the module, and which copies of the module do not have.

    The value may reference the module. In a ``WeakKeyDictionary`` such a module would never be freed.

    Args:
        name: A unique name of the value.
    """

    def __init__(self, name: str) -> None:
        self._name = f"_lightning_ups_{name}"

    def get(self, module: nn.Module) -> T | None:
        """Return the value stored for ``module``, or None."""
        kept = vars(module).get(self._name)
        return kept.value if kept is not None and kept.owner() is module else None  # a shallow copy has it, too

    def keep(self, module: nn.Module, value: T) -> None:
        """Store ``value``, replacing an earlier one."""
        vars(module)[self._name] = _Kept(ref(module), value)

    def drop(self, module: nn.Module) -> None:
        """Remove the value of ``module``."""
        vars(module).pop(self._name, None)


class _Kept:
    def __init__(self, owner: Callable[[], nn.Module | None], value: Any) -> None:
        self.owner, self.value = owner, value

    @override
    def __reduce__(self) -> Any:
        return _Kept, (_nobody, None)  # for copies and pickles


def _nobody() -> None:
    """Return the owner of a copied value."""
