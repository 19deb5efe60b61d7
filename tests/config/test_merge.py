import pytest

from lightning_ups.config.layers import Layer
from lightning_ups.config.merge import MergedList, overridden_values, put

# tests/config/test_command_line.py merges presets, files and options.


def test_the_settings_of_the_user_win():
    preset = Layer(
        name="preset", tree={"trainer": {"callbacks": [{"class_path": "Timer", "init_args": {"a": 1, "b": 1}}]}}
    )
    merged = MergedList("callbacks", preset)
    merged.add_file(Layer(name="x", tree={"trainer": {"callbacks": [{"class_path": "Timer", "init_args": {"b": 2}}]}}))
    (item,) = merged.merged()
    assert item.spec == {"class_path": "Timer", "init_args": {"a": 1, "b": 2}}
    assert merged.notes == ["x: Timer.b 2 instead of 1"]
    assert preset.tree == {"trainer": {}}


def test_an_option_about_an_item_of_a_file_is_left_to_the_parser():
    merged = MergedList("callbacks", None)
    assert not merged.add_option(".verbose", "true")
    assert merged.add_option("+", "Timer")
    assert merged.add_option(".verbose", "true")
    assert merged.typed == [{"class_path": "Timer", "init_args": {"verbose": "true"}}]


@pytest.mark.parametrize(("keys", "tree"), [("a.b", {"a": {"init_args": {"b": 1}}}), ("c.b", {"c": {"b": 1}})])
def test_put(keys, tree):
    found = {}
    put(found, keys.split("."), 1, ["a"])
    assert found == tree


def test_overridden_values():
    layers = [Layer(name="run.yaml", tree={"flags": {"tf32": False, "x": 1}}), Layer(name="typed", tree={})]
    assert [*overridden_values({"flags": {"tf32": True, "x": 1}}, layers)] == [
        "run.yaml: flags.tf32 False instead of True"
    ]
