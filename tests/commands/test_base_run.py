from argparse import ArgumentParser

import pytest
import yaml

from lightning_ups.cli import _RequestedRunCLI
from lightning_ups.commands.base_run import (
    accelerator_of_preset,
    add_common_options,
    base_of,
    parts_of_preset,
    store_of,
    write_new,
)


def parse(words):
    return _RequestedRunCLI(args=["fit", *words]).requested


def base(*words, **settings):
    tree = {"model": {"class_path": "tests.cli_toys.Toy", "init_args": {"width": 16}}, **settings}
    return base_of(parse, ["--config", yaml.safe_dump(tree), *words])


def names(found):
    return [part.name for part in parts_of_preset(found)]


def test_the_parts_of_a_preset_are_those_that_the_user_does_not_set():
    found = base("--preset", "h100")
    assert (found.preset, "--preset" in found.words) == ("h100", False)
    flags = ["flags.tf32", "flags.expandable_segments", "flags.attention"]
    assert names(found) == ["BF16Precision", "Compile", *flags]
    assert accelerator_of_preset(found) == {"trainer": {"accelerator": "gpu"}}
    found = base(
        "--preset=h100",
        trainer={"precision": "32-true", "accelerator": "cpu", "callbacks": ["Compile"]},
        flags={"tf32": False},
    )
    assert names(found) == flags[1:]
    assert accelerator_of_preset(found) == {}
    assert names(base(trainer={"accelerator": "cpu"})) == []


def test_explicit_settings_are_those_of_files_and_options():
    found = base(
        "--model.act=relu",
        "--trainer.callbacks+=ActivationOffload",
        data={"class_path": "tests.cli_toys.Data", "init_args": {"size": 4}},
        trainer={"accelerator": "cpu", "callbacks": ["Compile"]},
    )
    assert {
        "model": "tests.cli_toys.Toy",
        "model.width": 16,
        "model.act": "relu",
        "data.size": 4,
        "trainer.accelerator": "cpu",
        "callbacks.Compile": "Compile",
    }.items() <= found.explicit.items()
    assert "callbacks.ActivationOffload" in found.explicit
    assert not found.sets_precision
    assert base(trainer={"accelerator": "cpu", "plugins": ["BF16Precision"]}).sets_precision


def test_what_a_result_depends_on():
    one = base(trainer={"accelerator": "cpu"})
    assert base(trainer={"accelerator": "cpu"}).identity == one.identity
    assert base("--model.width=32", trainer={"accelerator": "cpu"}).identity["model"] != one.identity["model"]
    assert base(trainer={"accelerator": "cpu", "max_steps": 5}).identity["files"] != one.identity["files"]
    assert one.configuration("x: 1", preset=None).all_words[-4:] == ["--preset", "none", "--config", "x: 1\n"]


def test_several_nodes_are_refused():
    with pytest.raises(ValueError, match="num_nodes is 2"):
        base("--trainer.num_nodes=2", trainer={"accelerator": "cpu"}).devices(None)
    assert base("--trainer.devices=2", trainer={"accelerator": "cpu"}).devices(None) == ([], 2)


def test_files_are_never_overwritten(tmp_path):
    paths = [write_new(tmp_path / "ablate", ".json", text) for text in "ab"]
    assert [path.name for path in paths] == ["ablate.json", "ablate-2.json"]
    assert [path.read_text() for path in paths] == ["a", "b"]


def test_options_of_both_commands(tmp_path):
    parser = ArgumentParser()
    add_common_options(parser, seconds=7, output="x")
    found = parser.parse_args([])
    assert (found.seconds, found.limit, str(found.output), found.fresh) == (7, 300, "x", False)
    assert store_of(tmp_path, fresh=True) is None
    assert store_of(tmp_path, fresh=False).path.parent == tmp_path
