"""Settings of the model in a checkpoint: which are taken, and that nothing is imported for them."""

import contextlib
import enum
import sys
import types
import typing
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Protocol, TypedDict

import pytest
import torch
from lightning.pytorch.cli import LightningArgumentParser
from torch import nn

from lightning_ups.config.checkpoint_settings import (
    flat,
    nested_types,
    read_settings,
    settings_of_model,
    without_imports,
)
from lightning_ups.config.layers import Layer
from tests.cli_toys import Toy, Various

CANARY = "lightning_ups_canary"


class Kept(NamedTuple):
    act: Callable


class Keyed(TypedDict):
    act: Callable


class Callback(Protocol):
    def __call__(self, x: int) -> int: ...


class Choice(enum.Enum):
    ONE = 1


@dataclass
class Options:
    """Has a setting that is imported."""

    depth: int = 3
    act: Callable = torch.relu
    net: nn.Module | None = None


HINTS = {
    "module": nn.Module,
    "module or none": nn.Module | None,
    "callable": Callable,
    "callable of a module": Callable[[int], nn.Module],
    "callable or text": str | Callable,
    "annotated": Annotated[Callable, "of a loss"],
    "type": type,
    "type of a module": type[nn.Module],
    "python module": types.ModuleType,
    "type expression": types.UnionType,
    "protocol": Callback,
    "dtype": torch.dtype,
    "any": Any,
    "object": object,
    "type variable": typing.TypeVar("T"),
    "nothing": None,
    "text": str,
    "text or list": str | list[str],
    "number": int,
    "path": Path,
    "literal": Literal["a", 1],
    "enumeration": Choice,
    "dict": dict,
    "dict of any": dict[str, Any],
    "dict of modules": dict[str, nn.Module],
    "mapping of callables": Mapping[str, Callable],
    "dict or text": str | dict[str, Any],
    "list": list,
    "list of any": list[Any],
    "list of modules": list[nn.Module],
    "list of callables or none": list[Callable] | None,
    "sequence of types": Sequence[type],
    "iterable": Iterable,
    "tuple": tuple[int, Callable],
    "options": Options,
    "options or none": Options | None,
    "list of options": list[Options],
    "named tuple": Kept,
    "typed dict": Keyed,
}


def attacks(folder):
    module, function = f"{CANARY}.Module", f"{CANARY}.function"
    spec, act = {"class_path": module}, {"act": function}
    (folder / "spec.yaml").write_text(f"class_path: {module}\n")
    (folder / "act.yaml").write_text(f"act: {function}\ndepth: 4\n")
    (folder / "nested.yaml").write_text(f"a: {{class_path: {module}}}\n")
    (folder / "list.txt").write_text(f"{module}\n{{class_path: {module}}}\n")
    files = [str(folder / name) for name in ("spec.yaml", "act.yaml", "nested.yaml", "list.txt")]
    texts = [module, function, CANARY, f"{{class_path: {module}}}", f"{{a: {{class_path: {module}}}}}", f"[{module}]"]
    trees = [
        spec,
        act,
        act | {"depth": 4},
        {"class_path": module, "init_args": {}},
        {"class_path": "torch.nn.Sequential", "dict_kwargs": {"x": spec}},
        {"class_path": f"{__name__}.Options", "init_args": act},
        {"init_args": act},
        {"dict_kwargs": act},
        {"net": spec},
        {"net.class_path": module},
        {"a": spec},
        {"a": {"b": [spec]}},
        {"a": module},
        [spec],
        [module],
        [[spec]],
        [act],
        [1, function],
    ]
    return [*files, *texts, *trees, f"{CANARY}.Module | int"]


@pytest.fixture
def imported(tmp_path, monkeypatch):
    """Return whether the parser, given settings, imports the canary."""
    monkeypatch.syspath_prepend(tmp_path)
    text = (
        "from torch import nn\nclass Module(nn.Module): pass\ndef function(x: int = 1) -> nn.Module: return nn.ReLU()\n"
    )
    (tmp_path / f"{CANARY}.py").write_text(text)

    def imported(kind, settings):
        sys.modules.pop(CANARY, None)
        parser = LightningArgumentParser(exit_on_error=False)
        parser.add_class_arguments(kind, "model", fail_untyped=False, sub_configs=True)
        with contextlib.suppress(Exception):  # what does not fit is refused
            parser.instantiate_classes(parser.parse_object({"model": deepcopy(settings)}))
        return CANARY in sys.modules

    yield imported
    sys.modules.pop(CANARY, None)


def taking(hint, default=None):
    def init(self, it=default):
        pass

    init.__annotations__ = {} if hint is None else {"it": hint}
    return type("Taking", (), {"__init__": init, "__module__": __name__})


def kept_of(value, hint, given=None):
    """What is taken of ``it``, an argument of type ``hint``, and what is left out."""
    return without_imports({"it": value}, nested_types(taking(hint)), {} if given is None else {"it": given})


PLAIN = {"text", "text or list", "number", "path", "literal", "enumeration", "dict", "list", "iterable"}


@pytest.mark.parametrize("name", HINTS)
def test_nothing_is_imported_that_only_a_checkpoint_names(imported, tmp_path, name):
    kind = taking(HINTS[name])
    harmful = 0
    for attack in attacks(tmp_path):
        kept, left = without_imports({"it": deepcopy(attack)}, nested_types(kind), {})
        assert not kept or not imported(kind, kept), f"{attack} is kept as {kept}"
        if left and imported(kind, {"it": attack}):
            harmful += 1
    assert (harmful > 0) is (name not in PLAIN), "the parser would have imported the canary, or would not"


@pytest.mark.parametrize(
    ("hint", "value"),
    [
        ("text", "a.b"),
        ("text or list", "a.b"),
        ("text or list", ["a.b", "c"]),
        ("number", 3),
        ("path", "a/b"),
        ("literal", "a"),
        ("enumeration", "ONE"),
        ("dict", {"a": ["b.c", {"d": None}]}),
        ("dict of any", {"a": {"b": "c.d"}}),
        ("list", [1, "a.b"]),
        ("list of any", [["a.b"], 2.5]),
        ("any", "a.b"),
        ("nothing", {"a": [1, "x"]}),
        ("module or none", None),
        ("options", {"depth": 4}),
        ("options or none", {"depth": 4}),
        ("list of options", [{"depth": 4}]),
    ],
)
def test_plain_values_are_kept(hint, value):
    assert kept_of(value, HINTS[hint]) == ({"it": value}, {})


def spec(name, **settings):
    return {"class_path": name, "init_args": settings}


ELU = "torch.nn.ELU"


@pytest.mark.parametrize("given", [ELU, "ELU", {"class_path": ELU}])
def test_settings_of_a_class_are_taken_if_the_user_names_the_class(given):
    taken, left = kept_of(spec(ELU, alpha=2.0), nn.Module | None, given)
    name = given if isinstance(given, str) else given["class_path"]
    assert (taken, left) == ({"it": spec(name, alpha=2.0)}, {})


def test_settings_of_that_class_name_no_code_either():
    saved = spec(
        "torch.nn.TransformerEncoderLayer", d_model=3, activation=f"{CANARY}.function", device={"class_path": "x.Y"}
    )
    kept, left = kept_of(saved, nn.Module, {"class_path": "torch.nn.TransformerEncoderLayer"})
    assert kept["it"]["init_args"] == {"d_model": 3}
    assert left == {"it.init_args.activation": f"{CANARY}.function", "it.init_args.device": "x.Y"}
    assert kept_of(saved, nn.Module, "torch.nn.ReLU") == ({}, {})


TOY = "tests.cli_toys.Toy"


@pytest.fixture
def kept(tmp_path):
    """Write a checkpoint with these settings."""

    def kept(settings):
        path = tmp_path / "kept.ckpt"
        torch.save({"state_dict": {}, "hyper_parameters": settings}, path)
        return path

    return kept


def test_only_settings_that_are_not_given_are_taken(kept):
    saved = {"nested": {"depth": 5, "within": {"x": 6, "y": 7}}, "width": 3, "pair": (1, 2)}
    found = read_settings(kept(saved), Various, name="Various", given={"nested": {"within": {"x": 1}}, "pair": [3, 4]})
    wanted = {"nested": {"depth": 5, "within": {"y": 7}}, "width": 3}
    assert found.layer.tree == {"model": {"class_path": "Various", "init_args": wanted}}
    final = {"nested": {"depth": 5, "within": {"x": 1, "y": 7}}, "width": 3, "pair": [3, 4]}
    assert [line.split()[0] for line in found.differences(final, {"nested": {}, "pair+": {}})] == [
        "model.nested.within.x",
        "model.pair",
    ]
    assert [*found.differences(final, {})] == []


@pytest.mark.parametrize("name", [TOY, "Toy", None])
def test_a_checkpoint_of_the_same_class(kept, name):
    assert read_settings(kept({"_class_path": TOY, "width": 3}), Toy, name=name, given={}) is not None


def test_a_checkpoint_of_another_class_is_not_imported(kept, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "imported_by_a_checkpoint.py").write_text("raise SystemExit")
    path = kept({"_class_path": "imported_by_a_checkpoint.Toy", "width": 3})
    assert read_settings(path, Toy, name=TOY, given={}) is None
    assert "imported_by_a_checkpoint" not in sys.modules


def test_values_without_a_form_in_yaml_are_left_out_with_a_note(kept):
    path = kept({"width": torch.ones(1), "act": OrderedDict(a=1)})
    found = read_settings(path, Toy, name=TOY, given={})
    assert found.saved == {"act": {"a": 1}}
    (line,) = found.notes()
    assert "model.width" in line
    assert "torch.Tensor" in line
    assert [*read_settings(path, Toy, name=TOY, given={"width": 3}).notes()] == []


def test_settings_of_several_layers():
    trees = [
        {"class_path": "M", "init_args": {"a": {"b": 1}}},
        "M",
        {"init_args": {"a": {"c": 2}}},
    ]
    layers = [Layer(name="one", tree={"model": tree}) for tree in trees]
    assert settings_of_model(layers) == {"a": {"b": 1, "c": 2}}
    assert flat({"a": 1, "init_args": {"b": 2}}) == {"a": 1, "b": 2}


@pytest.mark.parametrize("name", ["half.ckpt", "gone.ckpt"])
def test_an_incomplete_checkpoint_gives_nothing(tmp_path, name):
    (tmp_path / "half.ckpt").mkdir()
    assert read_settings(tmp_path / name, Toy, name=TOY, given={}) is None
