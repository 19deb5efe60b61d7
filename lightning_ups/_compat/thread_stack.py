"""What is in force in one thread, so that runs in several threads do not see each other's."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import local
from typing import Generic, TypeVar

__all__ = ["ThreadStack"]

T = TypeVar("T")


class ThreadStack(local, Generic[T]):
    """The values of the contexts that the present thread has open, the innermost last."""

    def __init__(self) -> None:
        self.values: list[T] = []

    @property
    def innermost(self) -> T | None:
        """The last value, or None."""
        return self.values[-1] if self.values else None

    @contextmanager
    def holding(self, value: T) -> Iterator[None]:
        """Add ``value`` while the context is open; contexts may be closed in any order."""
        self.values.append(value)
        try:
            yield
        finally:
            place = next((i for i in reversed(range(len(self.values))) if self.values[i] is value), None)
            if place is not None:  # else closed by another thread
                del self.values[place]
