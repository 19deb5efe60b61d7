"""Contexts that several runs of a process may have open: values of a thread, settings of torch, log levels."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import RLock, get_ident, local
from types import ModuleType
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


@dataclass
class _Held:
    """What a setting was before the first open context, and the values of those that are open, oldest first."""

    default: Any
    before: dict[int, Any] = field(default_factory=dict)  # by thread
    values: dict[object, tuple[int, Any, bool]] = field(default_factory=dict)


_LOCK = RLock()
_HELD: dict[tuple[str, str], _Held] = {}


@contextmanager
def setting(config: ModuleType, name: str, value: Any, *, everywhere: bool = False) -> Iterator[None]:
    """Set ``config.name`` while the context is open. Contexts may be closed in any order; the newest open one decides.

    Torch's settings are per thread since 2.13, and per process before.

    Args:
        config: A config module of torch.
        name: Its attribute.
        value: The value.
        everywhere: Also set it in other threads, such as those of autograd, which may compile a backward.
    """
    entry, token, thread = config._config[name], object(), _thread(config, name)
    with _LOCK:
        held = _HELD.setdefault((config.__name__, name), _Held(entry.default))
        held.before.setdefault(thread, entry.user_override.get() if thread else entry.user_override)
        held.values[token] = thread, value, everywhere
        setattr(config, name, value)
        if everywhere:
            entry.default = value
    try:
        yield
    finally:
        with _LOCK:
            del held.values[token]
            left = [*held.values.values()]
            here = [value for of, value, _ in left if of == thread]
            setattr(config, name, here[-1] if here else held.before.pop(thread))
            entry.default = next((value for _, value, for_all in reversed(left) if for_all), held.default)
            if not left:
                del _HELD[config.__name__, name]


def values_set(config: ModuleType, name: str) -> list[Any]:
    """Return the values to which open contexts have set ``config.name``, of this thread if each has its own."""
    held, thread = _HELD.get((config.__name__, name)), _thread(config, name)
    return [value for of, value, _ in held.values.values() if of == thread] if held else []


def _thread(config: ModuleType, name: str) -> int:
    return get_ident() if isinstance(config._config[name].user_override, ContextVar) else 0


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
