from argparse import ArgumentParser

import pytest

from lightning_ups.config.suggestions import nearest, parse_options, suggest, suggest_file, unknown_command


@pytest.mark.parametrize(
    ("name", "known", "meant"),
    [
        ("Adamw", ["Adam", "AdamW"], "AdamW"),
        ("max_epochs", ["trainer.max_epochs", "trainer.max_steps"], "trainer.max_epochs"),
        ("max_epoch", ["max_epochs", "min_epochs"], "max_epochs"),
        ("fsdp3", ["fsdp", "fsdp2", "ddp"], "fsdp2"),
        ("fsdq", ["fsdp", "fsdp2"], "fsdp"),
        ("zebra", ["max_epochs"], None),
    ],
)
def test_nearest(name, known, meant):
    assert nearest(name, known) == meant


def test_suggest():
    assert "'h100'" in suggest("h10", ["h100", "cpu"])
    assert "a, b" in suggest("zebra", ["b", "a"])
    assert "0, 1, 10, ..." in suggest("zebra", map(str, range(20)), most=3)
    assert suggest("zebra", [], otherwise="nothing") == "nothing"


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("run", "'run.yaml'"),
        ("run.yml", "'run.yaml'"),
        ("rum.yaml", "'run.yaml'"),
        ("examples/quikstart.yaml", "'examples/quickstart.yaml'"),
        ("examples", "examples/quickstart.yaml"),
        ("nowhere/run.yaml", "Check the path."),
    ],
)
def test_suggest_file(tmp_path, monkeypatch, wrong, right):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").mkdir()
    for name in ("run.yaml", "another.yaml", "run.txt", "examples/quickstart.yaml"):
        (tmp_path / name).touch()
    assert right in suggest_file(wrong, endings=(".yaml", ".yml"))


@pytest.mark.parametrize(
    ("words", "cure"),
    [
        (["--config", "a b.yaml"], "fit --config 'a b.yaml'"),
        ([], "fit"),
        (["fti"], "Unknown command 'fti'. Did you mean 'fit'?"),
    ],
)
def test_unknown_command(words, cure):
    assert unknown_command(words, ["fit", "test"]).endswith(cure)


def test_parse_options():
    parser = ArgumentParser(prog="python -m lightning_ups doctor")
    parser.add_argument("--json", action="store_true")
    assert parse_options(parser, ["--json"]).json
    for wrong, meant in (("--jsn", "'--json'"), ("all", "'all'")):
        with pytest.raises(ValueError, match=meant):
            parse_options(parser, [wrong])


@pytest.mark.parametrize("words", ["tune --minutes", "ablate --limit", "diagnose --minutes", "advise --tokens"])
def test_a_wrong_option_of_a_command_that_takes_those_of_fit_is_one_line(ups, words):
    outcome = ups(*words.split(), "x")
    assert outcome.code == 2
    assert outcome.err.startswith("error: "), "and not with a list of all options"
    assert f"error: {words.replace(' ', ': argument ')}: invalid" in outcome.err
