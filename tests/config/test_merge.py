import pytest
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.plugins import CheckpointIO, MixedPrecision, Precision
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy

from lightning_ups.callbacks import ActivationCheckpoint, Compile
from lightning_ups.config.layers import Layer
from lightning_ups.config.merge import over_preset
from lightning_ups.precision import BF16Precision

KNOWN = {
    kind.__name__: kind
    for kind in (
        ActivationCheckpoint,
        AsyncCheckpointIO,
        BF16Precision,
        Compile,
        DDPStrategy,
        EarlyStopping,
        FSDPStrategy,
        LearningRateMonitor,
        MixedPrecision,
        ModelCheckpoint,
        TorchCheckpointIO,
    )
}


def merge(preset, *mine):
    layers = [Layer(name=f"{index}.yaml", tree=tree) for index, tree in enumerate(mine)]
    return over_preset(
        Layer(name="preset p", tree=preset),
        layers,
        find_class=lambda name: KNOWN.get(name.rpartition(".")[2]),
        precision=Precision,
        slots=[CheckpointIO],
    )


def trainer(**settings):
    return {"trainer": settings}


def spec(name, **init_args):
    return {"class_path": f"pkg.{name}", "init_args": init_args} if init_args else {"class_path": f"pkg.{name}"}


def test_callbacks_of_both():
    (base, mine), said = merge(trainer(callbacks=[spec("Compile")]), trainer(callbacks=["EarlyStopping"]))
    assert "callbacks" not in base.tree["trainer"]
    assert mine.tree["trainer"]["callbacks"] == [spec("Compile"), "EarlyStopping"]
    assert said == []


def test_one_class_is_merged_and_the_users_settings_win():
    (base, mine), said = merge(
        trainer(callbacks=[spec("Compile", mode="default", dynamic=False)]),
        trainer(callbacks=[spec("Compile", mode="max-autotune", scope="model")]),
    )
    assert mine.tree["trainer"]["callbacks"] == [spec("Compile", mode="max-autotune", dynamic=False, scope="model")]
    assert said == ["0.yaml: Compile.mode max-autotune instead of default"]
    assert base.tree["trainer"] == {}


def test_the_short_name_and_the_path_are_one_class():
    (_, mine), said = merge(
        trainer(callbacks=[spec("Compile", mode="default")]),
        trainer(callbacks=[{"class_path": "Compile", "init_args": {"scope": "model"}}]),
    )
    assert mine.tree["trainer"]["callbacks"] == [
        {"class_path": "Compile", "init_args": {"mode": "default", "scope": "model"}}
    ]
    assert said == []


def test_the_same_value_is_not_said():
    _, said = merge(
        trainer(callbacks=[spec("Compile", dynamic=False)], max_epochs=3),
        trainer(callbacks=[spec("Compile", dynamic="false")], max_epochs="3"),
    )
    assert said == []


def test_a_class_that_the_user_lists_twice_is_theirs_alone():
    (_, mine), _ = merge(
        trainer(callbacks=[spec("ModelCheckpoint", monitor="a", mode="max")]),
        trainer(callbacks=[spec("ModelCheckpoint", monitor="b"), spec("ModelCheckpoint", monitor="c")]),
    )
    assert mine.tree["trainer"]["callbacks"] == [
        spec("ModelCheckpoint", monitor="b"),
        spec("ModelCheckpoint", monitor="c"),
    ]


def test_a_list_stays_the_presets_where_the_user_has_none():
    (base, mine), said = merge(trainer(callbacks=[spec("Compile")]), trainer(max_epochs=1))
    assert base.tree["trainer"]["callbacks"] == [spec("Compile")]
    assert mine.tree["trainer"] == {"max_epochs": 1}
    assert said == []


def test_appending():
    (base, mine), _ = merge(
        trainer(callbacks=[spec("Compile", mode="default"), spec("EarlyStopping")]),
        {"trainer": {"callbacks+": [spec("Compile", scope="model"), "LearningRateMonitor"]}},
    )
    assert base.tree["trainer"]["callbacks"] == [spec("EarlyStopping")]
    assert mine.tree["trainer"]["callbacks+"] == [spec("Compile", mode="default", scope="model"), "LearningRateMonitor"]


def test_of_the_users_files_the_last_replaces_as_without_a_preset():
    (base, first, last), _ = merge(
        trainer(callbacks=[spec("Compile")]),
        trainer(callbacks=["EarlyStopping"]),
        trainer(callbacks=["LearningRateMonitor"]),
    )
    assert first.tree["trainer"]["callbacks"] == ["EarlyStopping"]  # the parser replaces it by the last
    assert last.tree["trainer"]["callbacks"] == [spec("Compile"), "LearningRateMonitor"]
    assert "callbacks" not in base.tree["trainer"]


def test_taking_away():
    (base, mine), said = merge(
        trainer(callbacks=[spec("Compile"), spec("EarlyStopping")]), {"trainer": {"callbacks-": "Compile"}}
    )
    assert base.tree["trainer"]["callbacks"] == [spec("EarlyStopping")]
    assert mine.tree["trainer"] == {}
    assert said == ["0.yaml: without Compile"]


def test_taking_away_what_is_not_there():
    with pytest.raises(ValueError, match=r"callbacks- takes Compil away.*classes out of preset p.*'Compile'\?$"):
        merge(trainer(callbacks=[spec("Compile")]), {"trainer": {"callbacks-": ["Compil"]}})


def test_a_precision_replaces_the_presets_plugin():
    (base, _), said = merge(trainer(plugins=[spec("BF16Precision")]), trainer(precision="32-true"))
    assert base.tree["trainer"].get("plugins", []) == []
    assert said == ["0.yaml: precision 32-true instead of BF16Precision"]


def test_no_precision_is_no_choice():
    (base, _), said = merge(trainer(plugins=[spec("BF16Precision")]), trainer(precision=None))
    assert base.tree["trainer"]["plugins"] == [spec("BF16Precision")]
    assert said == []


@pytest.mark.parametrize("key", ["plugins", "plugins+"])
def test_a_plugin_replaces_the_presets_precision(key):
    (base, mine), said = merge(trainer(precision="bf16-mixed"), trainer(**{key: [spec("BF16Precision")]}))
    assert "precision" not in base.tree["trainer"]
    assert mine.tree["trainer"][key] == [spec("BF16Precision")]
    assert said == ["0.yaml: BF16Precision instead of precision bf16-mixed"]


def test_a_plugin_that_is_appended_replaces_the_presets_for_its_slot():
    (base, mine), said = merge(
        trainer(plugins=[spec("BF16Precision"), spec("TorchCheckpointIO")]),
        trainer(**{"plugins+": [spec("AsyncCheckpointIO")]}),
    )
    assert base.tree["trainer"]["plugins"] == [spec("BF16Precision")]
    assert mine.tree["trainer"]["plugins+"] == [spec("AsyncCheckpointIO")]
    assert said == ["0.yaml: AsyncCheckpointIO instead of TorchCheckpointIO"]


@pytest.mark.parametrize("key", ["plugins", "plugins+"])
def test_a_list_that_a_later_file_replaces_takes_no_precision_away(key):
    mine = trainer(**{key: [spec("BF16Precision")]}), trainer(plugins=[spec("AsyncCheckpointIO")])
    (base, *_), said = merge(trainer(precision="bf16-mixed"), *mine)
    assert base.tree["trainer"]["precision"] == "bf16-mixed"
    assert said == []


def test_one_plugin_for_each_slot():
    (base, mine), said = merge(
        trainer(plugins=[spec("BF16Precision"), spec("TorchCheckpointIO")]),
        trainer(plugins=[spec("AsyncCheckpointIO"), spec("MixedPrecision", precision="bf16-mixed")]),
    )
    assert mine.tree["trainer"]["plugins"] == [
        spec("AsyncCheckpointIO"),
        spec("MixedPrecision", precision="bf16-mixed"),
    ]
    assert base.tree["trainer"].get("plugins", []) == []
    assert said == [
        "0.yaml: AsyncCheckpointIO instead of TorchCheckpointIO",
        "0.yaml: MixedPrecision instead of BF16Precision",
    ]


def test_plugins_of_other_slots_stay():
    (_, mine), _ = merge(trainer(plugins=[spec("BF16Precision")]), trainer(plugins=[spec("AsyncCheckpointIO")]))
    assert mine.tree["trainer"]["plugins"] == [spec("BF16Precision"), spec("AsyncCheckpointIO")]


def test_a_value_that_is_overridden_is_said():
    (base, _), said = merge({"flags": {"tf32": True}, **trainer(devices=8)}, {"flags": {"tf32": False}})
    assert base.tree["flags"] == {"tf32": True}  # the parser lays one over the other
    assert said == ["0.yaml: flags.tf32 False instead of True"]


def test_another_class_replaces_a_class_whole():
    (base, _), said = merge(
        trainer(strategy=spec("FSDPStrategy", cpu_offload=True)), trainer(strategy=spec("DDPStrategy"))
    )
    assert "strategy" not in base.tree["trainer"]
    assert said == ["0.yaml: trainer.strategy DDPStrategy instead of FSDPStrategy"]


def test_a_registered_name_replaces_a_class():
    (base, _), said = merge(trainer(strategy=spec("FSDPStrategy", cpu_offload=True)), trainer(strategy="ddp"))
    assert "strategy" not in base.tree["trainer"]
    assert said == ["0.yaml: trainer.strategy ddp instead of FSDPStrategy"]


def test_two_classes_that_cannot_be_found_are_not_the_same():
    (base, mine), said = merge(trainer(strategy=spec("Unknown", x=1)), trainer(strategy="ddp"))
    assert "strategy" not in base.tree["trainer"]
    assert mine.tree["trainer"]["strategy"] == "ddp"
    assert said == ["0.yaml: trainer.strategy ddp instead of Unknown"]


def test_settings_without_a_class_are_for_the_presets():
    (base, mine), said = merge(
        trainer(strategy=spec("FSDPStrategy", cpu_offload=True)),
        trainer(strategy={"init_args": {"cpu_offload": False}}),
    )
    assert base.tree["trainer"]["strategy"] == spec("FSDPStrategy", cpu_offload=True)
    assert mine.tree["trainer"]["strategy"] == {"init_args": {"cpu_offload": False}}
    assert said == []


def test_the_same_class_is_merged():
    (_, mine), said = merge(
        trainer(strategy=spec("FSDPStrategy", cpu_offload=True, limit_all_gathers=True)),
        trainer(strategy=spec("FSDPStrategy", cpu_offload=False)),
    )
    assert mine.tree["trainer"]["strategy"] == spec("FSDPStrategy", cpu_offload=False, limit_all_gathers=True)
    assert said == ["0.yaml: FSDPStrategy.cpu_offload False instead of True"]


def test_what_was_given_is_not_changed():
    preset, mine = trainer(callbacks=[spec("Compile", mode="a")]), trainer(callbacks=[spec("Compile", mode="b")])
    merge(preset, mine)
    assert preset == trainer(callbacks=[spec("Compile", mode="a")])
    assert mine == trainer(callbacks=[spec("Compile", mode="b")])
