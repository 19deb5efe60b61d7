"""What docs/development/releasing.md promises about names and versions."""

import importlib
import re
import tomllib
from pathlib import Path

import pytest

import lightning_ups
from lightning_ups.callbacks import ActivationCheckpoint
from tests.test_public import ROOMS
from tests.toys import Net, loader, trainer

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "development" / "releasing.md").read_text()


def test_the_version_is_the_same_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (newest, *_) = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert project["version"] == lightning_ups.__version__ == newest


def test_public_rooms_are_those_that_are_tested():
    (row,) = re.findall(r"^\| classes and functions.*", PAGE, re.M)
    rooms = re.findall(r"`lightning_ups\.(\w+)`", row)
    assert sorted(rooms) == sorted(ROOMS)
    assert all(importlib.import_module(f"lightning_ups.{room}").__all__ for room in rooms)


@pytest.mark.filterwarnings("ignore")
def test_a_deprecated_class_warns_and_works(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    names = {}
    exec(compile(code, "releasing.md", "exec"), names)
    with pytest.warns(FutureWarning, match="deprecated since 0.2.*Use ActivationCheckpoint"):
        old = names["Recompute"](save="nothing")
    losses = []
    for callback in (old, ActivationCheckpoint(save="nothing")):
        module = Net()
        trainer(tmp_path, callbacks=[callback], epochs=2).fit(module, loader())
        losses.append([loss.item() for loss in module.losses])
    assert losses[0] == losses[1]
