"""Contexts that several runs of a process may have open: values of a thread, settings of torch, log levels."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import RLock, local
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar

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


class SharedSettings:
    """Sets attributes of a config module while at least one context is open; contexts may be closed in any order.

    Torch's settings are per thread since 2.13, and per process before; contexts are counted accordingly.

    Args:
        config: The config module.
        names: Its attributes.
    """

    def __init__(self, config: ModuleType, *names: str) -> None:
        self._config, self._names = config, names
        entry = config._config[names[0]]
        self._open: Any = local() if isinstance(entry.user_override, ContextVar) else SimpleNamespace()
        self._lock = RLock()

    @property
    def values(self) -> tuple[Any, ...] | None:
        """The values set by the open contexts, or None."""
        return getattr(self._open, "values", None)

    @contextmanager
    def set(self, *values: Any) -> Iterator[None]:
        """Set the attributes to ``values``, which must equal those of other open contexts."""
        with self._lock:
            if self.values is None:
                self._open.values, self._open.count = values, 0
                self._open.before = [getattr(self._config, name) for name in self._names]
                self._write(values)
            assert self.values == values
            self._open.count += 1
        try:
            yield
        finally:
            with self._lock:
                self._open.count -= 1
                if not self._open.count:
                    self._open.values = None
                    self._write(self._open.before)

    def _write(self, values: Any) -> None:
        for name, value in zip(self._names, values, strict=True):
            setattr(self._config, name, value)


@contextmanager
def only_from(level: int, logger: str) -> Iterator[None]:
    """Suppress messages of ``logger`` and its children below ``level`` while the context is open."""
    named = logging.getLogger(logger)
    before = named.level
    named.setLevel(level)
    try:
        yield
    finally:
        named.setLevel(before)


@contextmanager
def without(text: str, logger: str) -> Iterator[None]:
    """Let ``logger`` leave out messages with ``text`` while the context is open."""
    named = logging.getLogger(logger)

    def is_another(record: logging.LogRecord) -> bool:
        return text not in record.getMessage()

    named.addFilter(is_another)
    try:
        yield
    finally:
        named.removeFilter(is_another)
