"""Write all pictures: ``PYTHONPATH=.:docs python -m pictures``, with names for some of them only."""

import sys
from importlib import import_module
from pathlib import Path

HERE = Path(__file__).parent
DRAWN = ("frontier", "memory", "order", "rooms", "speedups", "timeline")
RECORDED = sorted(path.stem for path in HERE.glob("raw/*.txt"))


def draw(name: str) -> str:
    """Return the picture of this name."""
    if name in RECORDED:
        return import_module("pictures.terminal").draw(name)
    return import_module(f"pictures.{name}").draw()


if __name__ == "__main__":
    for name in sys.argv[1:] or (*DRAWN, *RECORDED):
        (HERE / f"{name}.svg").write_text(draw(name))
