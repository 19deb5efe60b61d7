import yaml
from jsonargparse import get_loader

from lightning_ups.insight.tune import appending, leaves, merged, text_of


def test_lists_of_a_fragment_append():
    tree = {"trainer": {"callbacks": ["A"], "plugins+": ["B"], "devices": 2}}
    assert appending(tree) == {"trainer": {"callbacks+": ["A"], "plugins+": ["B"], "devices": 2}}
    assert tree["trainer"]["callbacks"] == ["A"], "the fragment itself is unchanged"


def test_fragments_are_merged_and_their_lists_joined():
    one = {"trainer": {"callbacks+": ["A"], "devices": 2}, "flags": {"tf32": True}}
    other = {"trainer": {"callbacks+": "B", "devices": 1}}
    assert merged([one, other]) == {"trainer": {"callbacks+": ["A", "B"], "devices": 1}, "flags": {"tf32": True}}
    assert one["trainer"]["callbacks+"] == ["A"]


def test_text_is_read_back_with_the_same_types():
    tree = {"a": "1e-3", "b": 1e-3, "c": "yes", "d": "null", "e": None, "f": True, "g": ["x.y"], "h": "32-true"}
    text = text_of(tree)
    assert get_loader("yaml")(text) == tree
    assert yaml.safe_load(text) == tree


def test_leaves_are_settings_lists_and_classes():
    tree = {"trainer": {"devices": 2, "callbacks": ["A"]}, "model": {"class_path": "M", "init_args": {"x": 1}}}
    assert dict(leaves(tree)) == {"trainer.devices": 2, "trainer.callbacks": ["A"], "model": tree["model"]}
