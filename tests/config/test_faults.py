"""Faults of a configuration by file and line. tests/test_cli.py has many more, with the whole command line."""

import pytest
from jsonargparse import ArgumentError
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser
from torch.optim import Optimizer

import lightning_ups.callbacks
import lightning_ups.data
import lightning_ups.strategies  # noqa: F401
import tests.cli_toys  # noqa: F401  (so that bare class names resolve)
from lightning_ups._compat.lightning.trainer import setting_types
from lightning_ups.config.classes import find_class
from lightning_ups.config.faults import Schema, find_faults, summarize
from lightning_ups.config.layers import Layer, read


@pytest.fixture(scope="module")
def schema():
    parser = LightningArgumentParser(exit_on_error=False)
    parser.add_lightning_class_args(Trainer, "trainer")
    parser.add_lightning_class_args(LightningModule, "model", subclass_mode=True)
    parser.add_optimizer_args((Optimizer,))
    return Schema(types=setting_types(parser), required=["model"])


@pytest.fixture
def faults(schema, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def faults(text, *more, accepted=False):
        (tmp_path / "run.yaml").write_text(text)
        return find_faults(schema, [read("run.yaml", command="fit"), *more], accepted=accepted)

    return faults


MODEL = "model:\n  class_path: tests.cli_toys.Toy\n"


def places(found):
    return [fault.partition(": ")[0] for fault in found]


def test_all_faults_have_their_lines(faults):
    found = faults(f"{MODEL}  init_args: {{wdth: 3}}\ntrainer:\n  max_epoch: 3\n  callbacks: [{{class_path: Timr}}]\n")
    assert places(found) == ["run.yaml:3", "run.yaml:5", "run.yaml:6"]


@pytest.mark.parametrize("name", ["NeptuneLogger", "lightning.pytorch.loggers.NeptuneLogger"])
def test_another_product_is_not_suggested(faults, name):
    (found,) = faults(f"{MODEL}trainer:\n  logger: {{class_path: {name}}}\n")
    assert "Did you mean" not in found
    (found,) = faults(f"{MODEL}trainer:\n  logger: {{class_path: WandLogger}}\n")
    assert "Did you mean 'WandbLogger'?" in found


@pytest.mark.parametrize(
    ("callbacks", "written"),
    [
        ("{Compile: {mode: default}}", "callbacks: [{class_path: Compile, init_args: {mode: default}}]"),
        ("{Compile: , RunManifest: }", "callbacks: [{class_path: Compile}, {class_path: RunManifest}]"),
        ("[{Compile: {mode: default}}]", "{class_path: Compile, init_args: {mode: default}}"),
    ],
)
def test_a_class_as_key_gets_the_right_form(faults, callbacks, written):
    (found,) = faults(f"{MODEL}trainer:\n  callbacks: {callbacks}\n")
    assert found.startswith("run.yaml:4: ")
    assert found.endswith(f"Write {written}")
    (found,) = faults("model: {tests.cli_toys.Toy: {width: 3}}\n")
    assert found.endswith("Write model: {class_path: tests.cli_toys.Toy, init_args: {width: 3}}")


def test_a_list_for_one_class_and_a_class_under_another_module(faults):
    (found,) = faults("model: [tests.cli_toys.Toy]\n")
    assert "model is a list: ['tests.cli_toys.Toy']. It takes one LightningModule, without" in found
    (found,) = faults(f"{MODEL}trainer:\n  strategy: [FSDP2Strategy]\n")
    assert "trainer.strategy is a list: ['FSDP2Strategy']. It takes one Strategy, without" in found
    (found,) = faults(f"{MODEL}trainer:\n  strategy: {{FSDP2Strategy: {{save: full}}}}\n")
    assert found.endswith("Write strategy: {class_path: FSDP2Strategy, init_args: {save: full}}")
    (found,) = faults(f"{MODEL}trainer:\n  callbacks: [{{class_path: lightning_ups.strategies.Compile}}]\n")
    assert found.endswith("has no class 'Compile'. Write 'Compile'.")
    (found,) = faults("model: {class_path: tests.toys.Toy}\n")
    assert found.endswith("has no class 'Toy'. Write 'tests.cli_toys.Toy'.")


def test_the_parser_ignores_empty_mappings_and_null(faults):
    text = (
        "model: {class_path: tests.cli_toys.Toy, init_args: {wdth: {}, act: gelu}, dict_kwargs: {}}\n"
        "trainer:\n  callbacks: [{class_path: Compile, init_args: {}}]\n  max_stepz: {a: {b: {}}}\n"
        "  num_nodes:\n  max_epochs:\noptimizer: {}\ntrianer: {}\n"
    )
    found = faults(text, Layer(name="options", tree={"model": {"init_args": {"with": {}}}}), accepted=True)
    assert places(found) == ["run.yaml:1", "run.yaml:4", "run.yaml:5", "run.yaml:8", "options"]


def test_a_right_configuration_has_no_faults(faults):
    text = (
        f"{MODEL}  init_args: {{width: 3}}\noptimizer: {{class_path: SGD, init_args: {{lr: 1e-3}}}}\n"
        "trainer: {max_epochs: null, callbacks: [Timer, {class_path: EarlyStopping, init_args: {monitor: a}}]}\n"
    )
    assert faults(text) == faults(text, accepted=True) == []


def test_null_is_right_for_a_choice_that_may_be_left_out(faults):
    compiles = "trainer: {callbacks: [{class_path: Compile, init_args: {on_failure: null, scope: auto}}]}\n"
    assert faults(f"{MODEL}{compiles}") == []
    (found,) = faults(f"{MODEL}{compiles.replace('auto', 'null')}")
    assert "scope is null. It takes 'blocks' or 'model' or 'auto'." in found


def test_settings_for_the_class_of_another_layer(faults):
    options = Layer(name="the command line", tree={"model": {"init_args": {"wdth": "3"}}})
    assert places(faults(MODEL, options)) == ["the command line"]


def test_an_error_in_the_users_module_is_raised(faults, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_module.py").write_text("1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        faults("model: {class_path: broken_module.Net}\n")


def test_other_errors_of_the_parser_are_shortened():
    text = 'Parser key "x":\n  Does not validate\n  Subtypes: [a]\n  Errors:\n    - Expected a list'
    assert summarize(ArgumentError(None, text)) == 'Parser key "x": - Expected a list'
    assert "--config run.yaml" in summarize(ArgumentError(None, "unrecognized arguments: run.yaml"))


def test_settings_of_a_class_that_is_not_named(faults):
    """As in a file of a LightningCLI whose classes are fixed."""
    (found,) = faults("model: {width: 3}\n")
    assert "'width'" in found
    assert "class_path" in found
    assert "init_args" in found


def test_readers_of_fields_go_by_their_bare_names(schema):
    assert find_class("StoredFields", [LightningDataModule])
