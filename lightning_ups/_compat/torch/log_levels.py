"""Sets the log levels of libraries."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["only_from", "without"]


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
