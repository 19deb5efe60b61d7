"""How much a library's logger says."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["only_from"]


@contextmanager
def only_from(level: int, logger: str) -> Iterator[None]:
    """Let ``logger``, and what is named below it, say nothing that is less than ``level`` while the context is open."""
    named = logging.getLogger(logger)
    before = named.level
    named.setLevel(level)
    try:
        yield
    finally:
        named.setLevel(before)
