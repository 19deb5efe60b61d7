"""The five short examples run as they are, but for a few steps, on the CPU, and not by Inductor."""

import re
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.filterwarnings("ignore::UserWarning")  # loaders without workers
@pytest.mark.parametrize("name", ["vision", "language", "physics", "graph", "gan"])
def test_an_example_trains(name, tmp_path, monkeypatch, capsys):
    path = EXAMPLES / f"{name}.py"
    quick, count = re.subn(
        r"max_steps=\d+", "max_steps=4, accelerator='cpu', enable_progress_bar=False", path.read_text()
    )
    assert count == 1
    monkeypatch.chdir(tmp_path)
    exec(compile(quick.replace("Compile(", "Compile(backend='aot_eager', "), path, "exec"), {"__file__": str(path)})
    assert re.search(r"(loss|error|radius): \d", capsys.readouterr().out)
