"""The modules of `zoo.py`: models of other libraries, trained as users of those libraries train them.

Nothing here knows lightning_ups. Each line has the size for a GPU, and a tiny one for tests on a CPU.
"""

from importlib import import_module

from zoo_modules.base import LINES, Line

__all__ = ["LINES", "Line", "load"]

_FILES = ("language", "vision", "audio_and_pairs", "science", "plain", "ways")


def load() -> dict[str, Line]:
    """Return every line by its name. The libraries are imported when a line is built."""
    for file in _FILES:
        import_module(f"zoo_modules.{file}")
    return LINES
