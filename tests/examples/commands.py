"""The commands of the examples, in processes of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*words, folder):
    """Return what Python prints, started with these words in ``folder``."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def said_by(config, *words, folder):
    """Return what ``fit`` prints with this file of the repository."""
    return run("-m", "lightning_ups", "fit", "--config", str(ROOT / config), *words, folder=folder)


def said(name, out):
    """Return the word after ``name``, which begins a line of ``out``."""
    return re.search(rf"^{name} +(\S+)", out, re.MULTILINE).group(1)
