"""The settings of a model in a checkpoint, as a layer and as differences."""

import sys
from collections import OrderedDict

import pytest
import torch

from lightning_ups.config.layers import Layer
from lightning_ups.config.saved_settings import flat, settings_of, taken_from
from tests.cli_toys import MoreKeywords, Toy, Various

TOY = "tests.cli_toys.Toy"


@pytest.fixture
def kept(tmp_path):
    """Save settings as a checkpoint has them."""

    def kept(settings):
        path = tmp_path / "kept.ckpt"
        torch.save({"state_dict": {}, "hyper_parameters": settings}, path)
        return path

    return kept


def test_what_is_given_is_left_out_by_its_leaves(kept):
    saved = {"nested": {"depth": 5, "within": {"x": 6, "y": 7}}, "width": 3, "pair": (1, 2)}
    found = taken_from(kept(saved), Various, name="Various")
    given = {"nested": {"within": {"x": 1}}, "pair": [3, 4]}
    wanted = {"nested": {"depth": 5, "within": {"y": 7}}, "width": 3}
    layer = found.beneath(given)
    assert layer.tree == {"model": {"class_path": "Various", "init_args": wanted}}
    assert layer.name == f"the checkpoint {found.path}"


def test_a_class_that_is_given_by_its_name_keeps_what_fits(kept):
    part = {"class_path": "tests.cli_toys.Part", "init_args": {"p": 3, "q": 4}}
    found = taken_from(kept({"part": part}), Various, name="Various")
    assert found.beneath({"part": "tests.cli_toys.Part"}).tree["model"]["init_args"] == {"part": part}
    assert found.beneath({"part": None}).tree["model"]["init_args"] == {}


@pytest.mark.parametrize(("name", "found"), [(TOY, True), ("Toy", True), (None, True), ("other.Toy", True)])
def test_a_class_is_known_by_what_it_is(kept, name, found):
    assert (taken_from(kept({"_class_path": TOY, "width": 3}), Toy, name=name) is not None) is found


def test_no_module_is_imported_that_a_checkpoint_names(kept, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "imported_by_a_checkpoint.py").write_text("raise SystemExit")
    path = kept({"_class_path": "imported_by_a_checkpoint.Toy", "width": 3})
    assert taken_from(path, Toy, name=TOY) is None
    assert "imported_by_a_checkpoint" not in sys.modules


def test_what_yaml_has_no_form_for_is_told_where_it_is_not_given(kept):
    found = taken_from(kept({"width": torch.ones(1), "act": OrderedDict(a=1)}), Toy, name=TOY)
    assert found.settings == {"act": {"a": 1}}
    (line,) = found.said({})
    assert line.startswith(f"model.width is not taken from {found.path}, which holds a torch.Tensor there.")
    assert line.endswith("Give it, unless its default is meant.")
    assert found.said({"width": 3}) == []


def test_what_a_class_above_it_has_kept_is_no_keyword(kept):
    found = taken_from(kept({"dim": 3, "width": 9, "foo": 4}), MoreKeywords, name="M")
    assert found.settings == {"dim": 3, "foo": 4}
    assert found.beneath({}).tree["model"] == {"class_path": "M", "init_args": {"dim": 3}, "dict_kwargs": {"foo": 4}}


def test_differences_are_told_by_their_leaves(kept):
    saved = {"nested": {"depth": 5, "within": {"x": 6, "y": 7}}, "maybe": {"any": 3}, "width": 3}
    found = taken_from(kept(saved), Various, name=None)
    final = {"nested": {"depth": 5, "within": {"x": 1, "y": 7}}, "maybe": {"other": 3}, "width": 3, "part": 3}
    assert found.differences(final, {"nested": {}}) == found.differences(final, final)[:1]
    assert found.differences(final, {"nested": {}, "maybe+": {}}) == [
        "model.nested.within.x is 1, as given, and not 6, as in the checkpoint.",
        "model.maybe is {'other': 3}, as given, and not {'any': 3}, as in the checkpoint.",
    ]


def test_settings_are_those_of_all_layers():
    trees = [
        {"class_path": "M", "init_args": {"a": {"b": 1}}},
        "M",
        {"init_args": {"a": {"c": 2}}, "dict_kwargs": None},
    ]
    layers = [Layer(name="one", tree={"model": tree}) for tree in trees]
    assert settings_of(layers) == {"a": {"b": 1, "c": 2}}
    assert flat({"a": 1, "dict_kwargs": {"b": 2}}) == {"a": 1, "b": 2}


def test_what_is_no_whole_checkpoint_gives_nothing(tmp_path):
    (tmp_path / "half.ckpt").mkdir()
    assert taken_from(tmp_path / "half.ckpt", Toy, name=TOY) is None
    assert taken_from(tmp_path / "gone.ckpt", Toy, name=TOY) is None
