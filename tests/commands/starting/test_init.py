from pathlib import Path

import pytest

from lightning_ups.__main__ import main
from lightning_ups.commands.starting import recipes


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_the_recipe_is_copied_and_the_next_commands_are_printed(capsys):
    assert main(["init", "gpt-1b"]) == 0
    assert Path("run.yaml").read_text() == recipes.text("gpt-1b")
    assert "\n     python -m lightning_ups fit --config run.yaml\n" in capsys.readouterr().out


def test_another_file_is_named_in_the_comments(capsys):
    assert main(["init", "gpt-1b", "--output", "mine.yaml"]) == 0
    assert "fit --config mine.yaml" in Path("mine.yaml").read_text()
    assert "run.yaml" not in Path("mine.yaml").read_text() + capsys.readouterr().out


def test_nothing_is_overwritten(capsys):
    Path("run.yaml").write_text("mine")
    assert main(["init", "gpt-1b"]) == 2
    assert "exists" in capsys.readouterr().err
    assert Path("run.yaml").read_text() == "mine"


@pytest.mark.parametrize("words", [[], ["gpt-1B"], ["gpt-1b", "--output", "no/such/folder/run.yaml"]])
def test_wrong_words(words, capsys):
    assert main(["init", *words]) == 2
    assert "Traceback" not in capsys.readouterr().err
