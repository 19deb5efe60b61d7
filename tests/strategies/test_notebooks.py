"""Notebooks: cells that IPython runs, as Jupyter's kernel does. docs/guides/notebooks.md describes what works there."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.test_docs import blocks
from tests.toys import outside_a_group

pytest.importorskip("IPython")

ROOT = Path(__file__).parents[2]
SHELL = """
import json, sys
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
for cell in json.load(sys.stdin):
    ran = shell.run_cell(cell)
    if error := ran.error_before_exec or ran.error_in_exec:
        print(f"ERROR {type(error).__name__}: {error}")
"""


def run_cells(folder, *cells):
    """Run cells in a shell of their own, and return what they print."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SHELL],
        input=json.dumps(cells),
        cwd=folder,
        env={
            **outside_a_group(),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "IPYTHONDIR": str(folder / "ipython"),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_cells_of_the_page_train_on_one_device_and_train_again(tmp_path):
    page = [*blocks((ROOT / "docs/guides/notebooks.md").read_text(), "python")]
    last = "print('LAST', trainer.global_step, type(trainer.strategy).__name__)"
    simple = "from lightning_ups.strategies import *; trainer = L.Trainer(strategy=SimpleFSDPStrategy(), devices=1)"
    left = "import os; print('PORT', os.environ.get('MASTER_PORT'))"  # which a script of the next cell would inherit
    out = run_cells(tmp_path, *page, left, *page, last, simple, last)
    assert "ERROR" not in out, out
    assert "\nPORT None\n" in out
    assert out.count("HTML object") == len([*tmp_path.rglob("report.html")]) == 2
    assert "\nLAST 16 FSDP2Strategy\n" in out
    assert "\nLAST 0 SimpleFSDPStrategy\n" in out


@pytest.mark.skipif(
    torch.version.cuda is not None, reason="a build for CUDA starts threads of autograd, which a fork loses"
)
def test_ddp_notebook_trains_after_a_strategy_of_this_package(tmp_path):
    first = next(blocks((ROOT / "docs/guides/notebooks.md").read_text(), "python"))
    forks = """
for folder in ("one", "two"):
    options = {"max_epochs": 2, "logger": False, "callbacks": [report], "default_root_dir": folder}
    trainer = L.Trainer(strategy="ddp_notebook", accelerator="cpu", devices=2, **options)
    trainer.fit(Model(), torch.utils.data.DataLoader(torch.randn(64, 64), batch_size=8))
    print("FORKED", report.path)
"""
    out = run_cells(tmp_path, first, forks, first)
    assert "ERROR" not in out, out
    for folder in ("one", "two"):  # the processes that wrote it have ended
        assert f"\nFORKED {folder}/report.html\n" in out
