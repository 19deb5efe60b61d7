"""The wheel: it is complete, can be published, and runs where the clone is not."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import lightning_ups

ROOT = Path(__file__).parent.parent
pytest.importorskip("hatchling")
pytest.importorskip("twine")


def run(*words: str, cwd: Path) -> str:
    done = subprocess.run([sys.executable, *words], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    run("-m", "hatchling", "build", "-t", "wheel", "-d", str(folder), cwd=ROOT)
    (found,) = folder.glob("*.whl")
    return found


def test_it_has_every_file_of_the_package(wheel):
    tracked = subprocess.check_output(["git", "ls-files", "lightning_ups"], cwd=ROOT, text=True).split()
    names = zipfile.ZipFile(wheel).namelist()
    assert {*tracked} <= {*names}
    assert {name.partition("/")[0] for name in names} == {
        "lightning_ups",
        f"lightning_ups-{lightning_ups.__version__}.dist-info",
    }


def test_it_can_be_published(wheel):
    assert "PASSED" in run("-m", "twine", "check", "--strict", str(wheel), cwd=wheel.parent)


def test_it_runs_without_the_clone(wheel):
    folder = wheel.parent / "installed"
    run(
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        str(folder),
        str(wheel),
        cwd=wheel.parent,
    )
    start = (
        f"import sys; sys.path.insert(0, {str(folder)!r}); from lightning_ups.__main__ import main; sys.exit(main())"
    )
    assert run("-P", "-c", start, "--version", cwd=folder) == f"lightning_ups {lightning_ups.__version__}\n"
    assert "h100" in run("-P", "-c", start, "presets", cwd=folder)
    assert "gpt-8b" in run("-P", "-c", start, "recipes", cwd=folder)
