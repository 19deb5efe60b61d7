"""The walk-throughs of CONTRIBUTING.md work: their snippets are run, as the files that they are for."""

import importlib
import re
import sys
import types
from pathlib import Path

import pytest

from lightning_ups import callbacks
from lightning_ups.callbacks import TextSample
from lightning_ups.order import Refusal
from lightning_ups.transforms.float8 import RECIPES, layers, recipes
from tests.order import test_refusals
from tests.transforms.float8.test_recipes import row_of, trains_and_is_undone

ROOT = Path(__file__).parent.parent
FENCES = re.findall(r"^```\w+ (\S+)\n(.*?)^```", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE | re.DOTALL)
SNIPPETS = dict(FENCES)


def test_each_file_has_one_snippet_and_a_folder():
    assert len(FENCES) == len(SNIPPETS) == 9
    assert all((ROOT / path).parent.is_dir() for path in SNIPPETS)


def executed(path, given=()):
    """Run a snippet among the names that its file has, and return these."""
    names = {"__name__": f"snippet_of_{Path(path).stem}", **dict(given)}
    exec(compile(SNIPPETS[path], path, "exec"), names)
    return names


def test_a_new_float8_recipe(tmp_path):
    made = executed("lightning_ups/transforms/float8/layers.py", vars(layers))
    try:
        executed("lightning_ups/transforms/float8/recipes.py", {**vars(recipes), "weight_only": made["weight_only"]})
        trains_and_is_undone("weight_only", tmp_path)
        assert row_of(RECIPES["weight_only"], SNIPPETS["docs/guides/precision.md"].splitlines())
    finally:
        RECIPES.pop("weight_only", None)


def test_a_new_callback(tmp_path, monkeypatch):
    made = types.ModuleType("lightning_ups.callbacks.dropout_rate")
    exec(SNIPPETS["lightning_ups/callbacks/dropout_rate.py"], vars(made))
    monkeypatch.setitem(sys.modules, made.__name__, made)
    exported = executed("lightning_ups/callbacks/__init__.py")
    monkeypatch.setattr(callbacks, "DropoutRate", exported["DropoutRate"], raising=False)
    tests = executed("tests/callbacks/test_dropout_rate.py")
    ran = [test(tmp_path) for name, test in tests.items() if name.startswith("test_")]
    assert len(ran) == 2
    assert "| `DropoutRate` |" in SNIPPETS["README.md"]


def test_a_new_refusal(monkeypatch):
    module = importlib.import_module("lightning_ups.order.refusals")
    row = eval(SNIPPETS["lightning_ups/order/refusals.py"], vars(module))
    assert isinstance(row, Refusal)
    entry = SNIPPETS["tests/order/test_refusals.py"]
    entries = eval(f"{{{entry}}}", {**vars(test_refusals), "TextSample": TextSample})
    monkeypatch.setattr(module, "REFUSALS", (*module.REFUSALS, row))
    for asked, text in entries.values():
        test_refusals.test_refused_with_what_why_and_cure(asked, text)
    for asked in test_refusals.ALLOWED.values():
        test_refusals.test_not_refused(asked)


def test_a_snippet_that_is_broken_is_seen(monkeypatch):
    path = "lightning_ups/transforms/float8/recipes.py"
    monkeypatch.setitem(SNIPPETS, path, SNIPPETS[path].replace("scales=", "scale="))
    with pytest.raises(TypeError, match="scale"):
        executed(path, {**vars(recipes), "weight_only": None})
