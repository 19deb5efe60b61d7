"""Values that are active in one thread, so that runs in several threads do not affect each other."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import local
from typing import Generic, TypeVar

__all__ = ["ThreadStack"]

T = TypeVar("T")


class ThreadStack(local, Generic[T]):
    """The values of the contexts that are open in the current thread, innermost last."""

    def __init__(self) -> None:
        self.values: list[T] = []

    @property
    def innermost(self) -> T | None:
        """The innermost value, or None."""
        return self.values[-1] if self.values else None

    @contextmanager
    def holding(self, value: T) -> Iterator[None]:
        """Add ``value`` while the context is open; contexts may be closed in any order."""
        self.values.append(value)
        try:
            yield
        finally:
            place = next((i for i in reversed(range(len(self.values))) if self.values[i] is value), None)
            if place is not None:  # otherwise closed by another thread
                del self.values[place]
