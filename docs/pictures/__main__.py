"""Write all pictures: ``PYTHONPATH=.:docs python -m pictures``, with names for some of them only."""

import sys
from importlib import import_module
from pathlib import Path

NAMES = ("speedups", "order", "rooms")

for name in sys.argv[1:] or NAMES:
    (Path(__file__).parent / f"{name}.svg").write_text(import_module(f"pictures.{name}").draw())
