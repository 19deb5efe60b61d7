import pytest
import yaml
from jsonargparse import get_loader

from lightning_ups.config.layers import Layer, items, preset_layer, read


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(text, name="run.yaml"):
        (tmp_path / name).write_text(text)
        return name

    return write


def test_each_value_has_a_line(write):
    layer = read(write("trainer:\n  callbacks:\n    - class_path: X\n      init_args: {a: 1}\n"), command="fit")
    assert layer.place("trainer", "callbacks", 0, "init_args", "a") == "run.yaml:4"
    assert layer.place("trainer", "callbacks", 0, "nothing") == "run.yaml:3"
    assert layer.place("nothing") == "run.yaml"


def test_one_file_for_several_commands(write):
    layer = read(write("fit:\n  trainer: {max_epochs: 1}\ntest: {}\n"), command="fit")
    assert layer.tree == {"trainer": {"max_epochs": 1}}
    assert layer.place("trainer", "max_epochs") == "run.yaml:2"


def test_the_trainer_in_a_file_of_its_own(write):
    write("max_epochs: 3\n", "trainer.yaml")
    assert read(write("trainer: trainer.yaml\n"), command="fit").tree == {"trainer": {"max_epochs": 3}}


def test_yaml_text_instead_of_a_file():
    assert read("{trainer: {max_epochs: 1}}", command="fit").tree == {"trainer": {"max_epochs": 1}}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a: [\n", "run.yaml:2"),
        ("a:\n\tb: 1\n", "run.yaml:2:1: .*spaces"),
        ("a:1\nb: 2\n", "run.yaml:2:2: .*line and the one before for a missing space after a colon"),
        ("- a\n", "run.yaml"),
        ("", "run.yaml is empty"),
        ("a: 1\nb:\n  c: 1\n  c: 2\n", "run.yaml:4: b.c .*line 3"),
        ("a: 1\nconfig: other.yaml\n", "run.yaml:2: .*--config"),
        ("fit: {config: [other.yaml]}\n", "run.yaml:1: .*--config"),
    ],
)
def test_wrong_files(write, text, names):
    with pytest.raises(ValueError, match=names):
        read(write(text), command="fit")


def test_files_that_cannot_be_read(write, tmp_path):
    write("a: 1\n")
    for name in ("rum.yaml", str(tmp_path), "run.yaml/x"):
        with pytest.raises(FileNotFoundError):
            read(name, command="fit")


def test_merge_keys_are_no_repetition(write):
    tree = read(write("a: &a {x: 1}\nb: {<<: *a, y: 2}\nc: {<<: *a, x: 3}\n"), command="fit").tree
    assert tree == {"a": {"x": 1}, "b": {"x": 1, "y": 2}, "c": {"x": 3}}


@pytest.mark.parametrize("value", ["1e-3", "on", "null", "3", 1e-3, 3, None, True, "ä: [", ["1e3"], {"a": {"b": "c"}}])
def test_the_text_has_the_same_values(value):
    assert get_loader("yaml")(Layer(name="x", tree={"a": value}).text) == {"a": value}


def test_presets_and_items():
    assert preset_layer("cpu").tree["trainer"]["accelerator"] == "cpu"
    assert preset_layer("cpu").name == "preset cpu"
    assert (items(None), items("a"), items(["a"])) == ([], ["a"], ["a"])
    assert isinstance(yaml.safe_load(preset_layer("h100").text), dict)
