from collections.abc import Sequence
from typing import Literal

import pytest
from jsonargparse import ArgumentError, ArgumentParser
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.cli import LightningArgumentParser
from torch.optim import Optimizer

import lightning_ups.callbacks  # noqa: F401  (so that bare class names resolve)
from lightning_ups._compat.lightning.trainer import setting_types
from lightning_ups.config.diagnosis import diagnosis, find_class, ignored
from lightning_ups.config.layers import Layer, read


@pytest.fixture(scope="module")
def types():
    from lightning.pytorch import Trainer

    parser = LightningArgumentParser(exit_on_error=False)
    parser.add_lightning_class_args(Trainer, "trainer")
    parser.add_lightning_class_args(LightningModule, "model", subclass_mode=True)
    parser.add_optimizer_args((Optimizer,))
    parser.add_lr_scheduler_args()
    return setting_types(parser)


@pytest.fixture
def faults(types, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def faults(text, *more, said="what the parser said"):
        (tmp_path / "run.yaml").write_text(text)
        layers = [read("run.yaml", command="fit"), *more]
        return diagnosis(types, layers, ArgumentError(None, said), required=["model"]).splitlines()

    return faults


MODEL = "model:\n  class_path: tests.cli_toys.Toy\n"


def test_every_fault_at_once(faults):
    assert faults(f"{MODEL}  init_args: {{wdth: 3}}\ntrainer:\n  max_epoch: 3\n") == [
        "run.yaml:3: Toy has no setting 'wdth'. It takes width, act, fail. Did you mean 'width'?",
        "run.yaml:5: there is no setting 'trainer.max_epoch'. Did you mean 'trainer.max_epochs'?",
    ]


def test_what_the_parser_passes_over_is_an_empty_mapping_that_no_setting_takes(types, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(
        "model: {class_path: tests.cli_toys.Toy, init_args: {wdth: {}}, dict_kwargs: {}}\n"
        "trainer:\n  callbacks: [{class_path: Compile, init_args: {}}, {class_path: Timer, init_args: {durations: {}}}]"
        "\n  max_stepz: {a: {b: {}}}\n"
        "optimizer: {}\n"
        "trianer: {}\n"
    )
    layers = [Layer(name="the command line", tree={"model": {"init_args": {"with": {}}}})]
    assert ignored(types, [read("run.yaml", command="fit"), *layers]) == [
        "run.yaml:1: Toy has no setting 'wdth'. It takes width, act, fail. Did you mean 'width'?",
        "run.yaml:3: Timer has no setting 'durations'. It takes duration, interval, verbose. Did you mean 'duration'?",
        "run.yaml:4: there is no setting 'trainer.max_stepz'. Did you mean 'trainer.max_steps'?",
        "run.yaml:6: there is no setting 'trianer'. Did you mean 'trainer'?",
        "the command line: Toy has no setting 'with'. It takes width, act, fail. Did you mean 'width'?",
    ]


def test_null_is_passed_over_by_the_parser_too(types, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "takes_null.py").write_text(
        "from typing import Any\nfrom lightning.pytorch import Callback\n\n\nclass Own(Callback):\n"
        "    def __init__(self, a=1, b: Any = 2, c: int = None, d: int | None = 3, e: float = 4.0): ...\n"
    )
    (tmp_path / "run.yaml").write_text(
        "model: {class_path: tests.cli_toys.NeedsWidth, init_args: {width: null}}\n"
        "trainer:\n  num_nodes: null\n  max_epochs: null\n  callbacks:\n"
        "    - {class_path: takes_null.Own, init_args: {a: null, b: null, c: null, d: null, e: null}}\n"
        "    - {class_path: Timer, init_args: null}\n"
        "optimizer: null\n"
    )
    layers = [
        read("run.yaml", command="fit"),
        Layer(name="the command line", tree={"model": {"init_args": {"width": "3"}}, "trainer": {"strategy": None}}),
    ]
    assert ignored(types, layers) == [
        "run.yaml:3: trainer.num_nodes is null. It takes int.",
        "run.yaml:6: trainer.callbacks[0].init_args.e is null. It takes float.",
        "the command line: trainer.strategy is null. It takes str or Strategy.",
    ]
    assert ignored(types, layers, may_be_null=lambda key: key.startswith("trainer."))[0].startswith("run.yaml:6")


def test_null_is_told_once_beside_other_faults(faults):
    more = Layer(name="the command line", tree={"model": {"init_args": {"width": "null"}}})
    assert faults(f"{MODEL}trainer:\n  max_epoch: 3\n", more) == [
        "run.yaml:4: there is no setting 'trainer.max_epoch'. Did you mean 'trainer.max_epochs'?",
        "the command line: model.init_args.width is null. It takes int.",
    ]


def test_an_empty_mapping_is_told_beside_other_faults(faults):
    assert faults(f"{MODEL}  init_args: {{wdth: {{}}}}\ntrainer:\n  max_epoch: 3\n") == [
        "run.yaml:3: Toy has no setting 'wdth'. It takes width, act, fail. Did you mean 'width'?",
        "run.yaml:5: there is no setting 'trainer.max_epoch'. Did you mean 'trainer.max_epochs'?",
    ]


def test_a_section_misspelled(faults):
    assert faults(f"{MODEL}trianer: {{}}\n") == ["run.yaml:3: there is no setting 'trianer'. Did you mean 'trainer'?"]


def test_a_setting_in_the_wrong_section(faults):
    assert faults(f"{MODEL}max_epochs: 1\n") == [
        "run.yaml:3: there is no setting 'max_epochs'. Did you mean 'trainer.max_epochs'?"
    ]


def test_a_setting_like_none(faults):
    (fault,) = faults(f"{MODEL}zebra: 1\n")
    assert fault == "run.yaml:3: there is no setting 'zebra'. There are lr_scheduler, model, optimizer, trainer."


def test_a_section_that_holds_no_settings(faults):
    (fault,) = faults(f"{MODEL}trainer: 3\n")
    assert fault == "run.yaml:3: trainer is 3. It holds settings, such as trainer.accelerator."


def test_a_wrong_type(faults):
    assert faults(f"{MODEL}trainer:\n  max_epochs: many\n") == [
        "run.yaml:4: trainer.max_epochs is 'many'. It takes int or null."
    ]


def test_a_wrong_choice(faults):
    assert faults(f"{MODEL}  init_args: {{act: gelo}}\ntrainer: {{precision: bf16-mixd}}\n") == [
        "run.yaml:3: model.init_args.act is 'gelo'. Did you mean 'gelu'?",
        "run.yaml:4: trainer.precision is 'bf16-mixd'. Did you mean 'bf16-mixed'?",
    ]
    assert faults(f"{MODEL}  init_args: {{act: zebra}}\n") == [
        "run.yaml:3: model.init_args.act is 'zebra'. It takes 'gelu' or 'relu'."
    ]


def test_a_wrong_choice_in_a_list(tmp_path):
    (tmp_path / "run.yaml").write_text("flags: {attention: [flash, cudn]}\n")
    types = {"flags.attention": Sequence[Literal["cudnn", "flash"]] | None}
    text = diagnosis(types, [read(str(tmp_path / "run.yaml"), command="fit")], ArgumentError(None, ""), required=[])
    assert text.endswith(":1: flags.attention is ['flash', 'cudn']. Did you mean 'cudnn'?")


def test_a_tuple_of_numbers_is_no_list_of_classes(faults):
    (fault,) = faults(f"{MODEL}optimizer:\n  class_path: Adam\n  init_args: {{betas: [0.9]}}\n")
    assert fault.startswith("run.yaml:5: optimizer.init_args.betas is [0.9]. It takes tuple[")


def test_a_class_misspelled(faults):
    assert faults("model:\n  class_path: tests.cli_toys.Toyy\n") == [
        "run.yaml:2: the module tests.cli_toys has no 'Toyy'. Did you mean 'Toy'?"
    ]


def test_a_module_misspelled(faults):
    (fault,) = faults("model:\n  class_path: tests.cli_tois.Toy\n")
    assert fault.startswith("run.yaml:2: tests.cli_tois.Toy: there is no module 'tests.cli_tois'. ")
    assert fault.endswith(" Did you mean 'tests.cli_toys.Toy'?")


def test_a_short_name_misspelled(faults):
    (fault,) = faults(f"{MODEL}trainer:\n  callbacks: [Compil]\n")
    assert fault.startswith("run.yaml:4: no Callback is known as 'Compil'.")
    assert fault.endswith(" Did you mean 'Compile'?")


def test_a_class_of_another_kind(faults):
    (fault,) = faults("model:\n  class_path: tests.cli_toys.Data\n")
    assert fault.startswith("run.yaml:2: tests.cli_toys.Data is no LightningModule.")


def test_a_key_beside_class_path(faults):
    (fault,) = faults(f"{MODEL}trainer:\n  callbacks:\n    - class_pth: ModelCheckpoint\n")
    assert fault.startswith("run.yaml:5: trainer.callbacks[0] has the key 'class_pth'.")
    assert fault.endswith("Did you mean 'class_path'?")


def test_a_setting_beside_class_path(faults):
    assert faults(f"{MODEL}trainer:\n  callbacks:\n    - class_path: ActivationCheckpoint\n      save: nothing\n") == [
        "run.yaml:6: trainer.callbacks[0] has the key 'save'. A class is given by class_path, and its settings by"
        " init_args. Put it below init_args."
    ]


@pytest.mark.parametrize("name", ["tests.cli_toys", "tests/cli_toys.py", "tests/cli_toys"])
def test_a_module_or_a_file_in_place_of_a_class(faults, name):
    (fault,) = faults(f"model:\n  class_path: {name}\n")
    assert fault.startswith(f"run.yaml:2: no LightningModule is known as {name!r}. A class of your own is named with")
    assert fault.endswith("Did you mean 'tests.cli_toys.Toy'?")


@pytest.mark.parametrize("name", ["./tests.cli_toys.Toy", "tests..cli_toys.Toy", "tests.cli_toys:Toy"])
def test_a_slip_in_the_path_of_a_class(faults, name):
    (fault,) = faults(f"model:\n  class_path: {name}\n")
    assert fault.startswith(f"run.yaml:2: no LightningModule is known as {name!r}.")
    assert fault.endswith("Did you mean 'tests.cli_toys.Toy'?")


@pytest.mark.parametrize(
    ("name", "cure"),
    [
        ("tests.cli_toys.py.Toy", "Did you mean 'tests.cli_toys.Toy'?"),
        ("tests.cli_toys.py.toy", "Did you mean 'tests.cli_toys.Toy'?"),
        ("tests.cli_toys.py.Zzzzz", "Name a class of it, as in 'tests.cli_toys.CLASS'."),
    ],
)
def test_the_ending_of_a_file_in_the_path_of_a_class(faults, name, cure):
    (fault,) = faults(f"model:\n  class_path: {name}\n")
    assert fault == (
        f"run.yaml:2: {name}: there is no module 'tests.cli_toys.py'. tests.cli_toys is one file, and holds none."
        f" {cure}"
    )


def test_a_file_that_no_import_finds(faults):
    (fault,) = faults("model:\n  class_path: gone/net.py\n")
    assert fault.endswith("named with its module, as in 'gone.net.CLASS'. Run where it can be imported.")


def test_a_class_that_belongs_to_another_setting(faults):
    (fault,) = faults(f"{MODEL}trainer:\n  callbacks: [DDPStrategy]\n")
    assert fault == "run.yaml:4: DDPStrategy is no Callback. It is for trainer.strategy. Put it there."


def test_the_package_in_place_of_the_module_of_a_class(faults):
    (fault,) = faults(f"{MODEL}trainer:\n  callbacks: [{{class_path: lightning_ups.Compile}}]\n")
    assert fault == "run.yaml:4: the module lightning_ups has no 'Compile'. Write 'Compile' alone."


def test_no_class(faults):
    (fault,) = faults(f"{MODEL}trainer:\n  callbacks:\n    - init_args: {{monitor: x}}\n")
    assert fault.startswith("run.yaml:5: trainer.callbacks[0] names no class.")


def test_a_list_where_one_class_belongs(faults):
    (fault,) = faults("model: [tests.cli_toys.Toy]\n")
    assert fault == "run.yaml:1: model is ['tests.cli_toys.Toy']. It takes LightningModule or null."


def test_settings_of_an_element(faults):
    callbacks = "    - LearningRateMonitor\n    - class_path: ModelCheckpoint\n      init_args:\n"
    text = f"{MODEL}trainer:\n  callbacks:\n{callbacks}"
    assert faults(text + "        save_topk: 3\n")[0].startswith(
        "run.yaml:8: ModelCheckpoint has no setting 'save_topk'. It takes dirpath, filename, "
    )
    assert faults(text + "        save_top_k: all\n") == [
        "run.yaml:8: trainer.callbacks[1].init_args.save_top_k is 'all'. It takes int."
    ]


def test_a_setting_that_a_class_takes_among_others(faults, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "takes_others.py").write_text(
        "from lightning.pytorch import Callback\n\n\nclass Own(Callback):\n    def __init__(self, **others): ...\n"
    )
    (fault,) = faults(f"{MODEL}trainer:\n  callbacks:\n  - class_path: takes_others.Own\n    init_args: {{size: 3}}\n")
    assert fault == "run.yaml:6: Own names no setting 'size', but takes others. Give it under dict_kwargs."


def test_an_element_that_needs_a_setting(faults):
    assert faults(f"{MODEL}trainer:\n  callbacks: [EarlyStopping]\n") == [
        "run.yaml:4: EarlyStopping needs monitor. There is no default. Give it under init_args."
    ]
    text = f"{MODEL}trainer:\n  callbacks:\n    - class_path: EarlyStopping\n      init_args: {{mode: min}}\n"
    assert faults(text)[0].startswith("run.yaml:5: EarlyStopping needs monitor.")


def test_appended_lists_are_looked_at(faults):
    (fault,) = faults(f"{MODEL}trainer:\n  callbacks+: [Compil]\n")
    assert fault.endswith("Did you mean 'Compile'?")


def test_an_optimizers_settings(faults):
    (fault,) = faults(f"{MODEL}optimizer:\n  class_path: AdamW\n  init_args: {{lrr: 1}}\n")
    assert fault.startswith("run.yaml:5: AdamW has no setting 'lrr'. It takes lr, betas, ")
    assert fault.endswith("Did you mean 'lr'?")


def test_what_has_no_default(faults):
    assert faults("model:\n  class_path: tests.cli_toys.NeedsWidth\n") == [
        "model: NeedsWidth needs width. There is no default. Give it under init_args, or by --model.width VALUE."
    ]
    (fault,) = faults(f"{MODEL}lr_scheduler:\n  class_path: CosineAnnealingLR\n")
    assert fault.startswith("lr_scheduler: CosineAnnealingLR needs T_max.")


def test_no_model(faults):
    (fault,) = faults("trainer: {max_epochs: 1}\n")
    assert fault.startswith("No 'model' is given. There is no default.")


def test_a_layer_that_gives_settings_for_the_class_of_another(faults):
    more = Layer(name="the command line", tree={"model": {"init_args": {"wdth": "3"}}})
    assert faults(MODEL, more) == [
        "the command line: Toy has no setting 'wdth'. It takes width, act, fail. Did you mean 'width'?"
    ]


def test_a_missing_package(faults, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "needs_more.py").write_text("import os\nimport not_installed_at_all.inner\n")
    (fault,) = faults("model:\n  class_path: needs_more.Model\n")
    assert fault == (
        f"run.yaml:2: needs_more.Model cannot be imported. {tmp_path}/needs_more.py:2 imports 'not_installed_at_all',"
        " which is not installed. Run: pip install not_installed_at_all"
    )


def test_an_error_in_the_users_module_is_the_users(faults, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_module.py").write_text("undefined_name\n")
    with pytest.raises(NameError, match="undefined_name"):
        faults("model:\n  class_path: broken_module.Model\n")


def test_what_is_not_understood_is_said_by_the_parser_in_short(faults):
    said = (
        'Parser key "model":\n  Does not validate against any of the Union subtypes\n  Subtypes: [a, b]\n  Errors:\n'
        "    - the reason\n    - Expected a <class 'NoneType'>\n  Given value type: <class 'dict'>\n  Given value: {}"
    )
    assert faults(MODEL, said=said) == ['Parser key "model": - the reason']


def test_find_class():
    from tests.cli_toys import Noted, Toy

    assert find_class("tests.cli_toys.Toy", [LightningModule]) is Toy
    assert find_class("Noted", [Callback]) is Noted
    assert find_class("Nothing", [Callback]) is None
    assert find_class("nowhere.Nothing", [Callback]) is None
    assert find_class("tests.cli_toys.torch", [Callback]) is None


def test_the_parser_agrees_about_what_is_right():
    # What has no fault here is taken by the parser: the two must not drift apart.
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(LightningModule, "model")
    tree = {"model": {"class_path": "tests.cli_toys.Toy", "init_args": {"width": 3, "act": "relu"}}}
    parser.parse_object(tree)
    layer = Layer(name="run.yaml", tree=tree)
    assert diagnosis(setting_types(parser), [layer], ArgumentError(None, "nothing"), required=[]) == "nothing"


@pytest.mark.parametrize(
    ("name", "cure"),
    [
        ("ddp", "Write 'DDPStrategy'."),
        ("fsdp2", "Write 'FSDP2Strategy'."),
        ("ddp_find_unused_parameters_true", "Write 'DDPStrategy', with find_unused_parameters=True."),
        ("deepspeed_stage_2", "Write 'DeepSpeedStrategy', with stage=2."),
    ],
)
def test_the_class_for_the_name_of_a_strategy_has_what_the_name_says(faults, name, cure):
    strategy = f"  strategy: {{class_path: {name}, init_args: {{process_group_backend: gloo}}}}\n"
    (fault,) = faults(f"{MODEL}trainer:\n{strategy}")
    assert fault.endswith(f"is given by its class. {cure}")
