from dataclasses import replace

import pytest
import torch
from lightning.pytorch.plugins import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy

import lightning_ups.strategies  # noqa: F401
from lightning_ups.callbacks import AccelerationFlags, ActivationCheckpoint
from lightning_ups.config.requested_run import (
    RequestedRun,
    build_on_meta,
    call_configure_model,
    check_trainer,
    instantiate,
    missing_gpu,
    run_of,
)
from lightning_ups.precision import BF16Precision
from tests.cli_toys import Late, NoMeta, Toy

DEFAULTS = {
    "accelerator": "cpu",
    "strategy": "auto",
    "devices": "auto",
    "num_nodes": 1,
    "precision": None,
    "plugins": None,
    "callbacks": None,
}


def run(**settings):
    return run_of(Toy(), DEFAULTS | settings, [])


def test_the_defaults_and_a_machine_that_is_not_here():
    found = run()
    assert (found.strategy.name, found.accelerator, found.num_devices) == ("SingleDeviceStrategy", "cpu", 1)
    assert found.precision.precision == "32-true"
    assert found.training
    found = run(accelerator="gpu", devices=8, num_nodes=2)
    assert (found.strategy.name, found.accelerator, found.num_devices, found.num_nodes) == ("DDPStrategy", "cuda", 8, 2)
    assert run(accelerator="auto").accelerator == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(
    ("devices", "count"), [(3, 3), ("3", 3), ([0, 2], 2), ("0,2", 2), ("0,", 1), ("auto", 1), (-1, 1)]
)
def test_devices(devices, count):
    assert run(devices=devices).num_devices == count


@pytest.mark.parametrize("devices", [0, "0", "some", -2, "1.5", [], ","])
def test_no_number_of_devices(devices):
    with pytest.raises(ValueError, match=r"trainer\.devices"):
        run(devices=devices)


@pytest.mark.parametrize("name", ["accumulate_grad_batches", "val_check_interval", "check_val_every_n_epoch"])
def test_no_number_of_batches_or_epochs(name):
    for value in (0, -1):
        with pytest.raises(ValueError, match=rf"trainer\.{name} is {value}"):
            run(**{name: value})
    for value in (None, 1, 0.5):
        run(**{name: value})


@pytest.mark.parametrize(
    ("strategy", "name", "shards", "ours"),
    [
        ("ddp", "DDPStrategy", False, False),
        ("fsdp", "FSDPStrategy", True, False),
        ("FSDP", "FSDPStrategy", True, False),
        ("fsdp2", "FSDP2Strategy", True, True),
        (DDPStrategy(), "DDPStrategy", False, False),
    ],
)
def test_strategies(strategy, name, shards, ours):
    placement = run(strategy=strategy).strategy
    assert (placement.name, placement.shards, placement.ours) == (name, shards, ours)


@pytest.mark.parametrize(
    ("precision", "kind", "name"),
    [
        (None, Precision, "32-true"),
        ("bf16-mixed", MixedPrecision, "bf16-mixed"),
        ("bf16", MixedPrecision, "bf16-mixed"),
        ("bf16-true", HalfPrecision, "bf16-true"),
        ("transformer-engine", Precision, "transformer-engine"),
        (64, Precision, "64-true"),
    ],
)
def test_precisions(precision, kind, name):
    found = run(precision=precision).precision
    assert isinstance(found, kind)
    assert found.precision == name


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({}, "bf16-mixed"),
        ({"precision": 16}, "bf16-mixed"),
        ({"strategy": "fsdp2"}, "16-mixed"),  # which refuses it
        ({"accelerator": "gpu"}, "16-mixed"),
    ],
)
def test_float16_on_a_cpu_is_what_the_trainer_makes_of_it(settings, name):
    assert run(**{"precision": "16-mixed"} | settings).precision.precision == name


def test_a_precision_among_the_plugins():
    plugin = BF16Precision()
    assert run(plugins=[plugin]).precision is plugin
    assert run(plugins=plugin).precision is plugin


def test_callbacks_and_those_of_slots():
    mine, flags = ActivationCheckpoint(), AccelerationFlags()
    assert run_of(Toy(), DEFAULTS | {"callbacks": mine}, [flags]).callbacks == (mine, flags)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"precision": "32-true", "plugins": [BF16Precision()]}, "precision=32-true and BF16Precision"),
        ({"plugins": [MixedPrecision("bf16-mixed", "cpu"), BF16Precision()]}, "MixedPrecision and BF16Precision"),
        ({"strategy": "fsdq2"}, "'fsdq2'.*'fsdp2'"),
        ({"accelerator": "gpuu"}, "'gpuu'.*'gpu'"),
    ],
)
def test_wrong_settings(settings, names):
    with pytest.raises(ValueError, match=names):
        check_trainer(DEFAULTS | settings, here=False)


def test_right_settings():
    for settings in ({"plugins": [BF16Precision()]}, {"strategy": FSDPStrategy()}):
        check_trainer(DEFAULTS | settings, here=True)


def test_a_gpu_that_is_not_here(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="GPU"):
        check_trainer(DEFAULTS | {"accelerator": "gpu"}, here=True)
    check_trainer(DEFAULTS | {"accelerator": "gpu"}, here=False)
    assert missing_gpu("gpu") is not None
    assert missing_gpu("cpu") is missing_gpu("auto") is None


@pytest.mark.parametrize(("kind", "device"), [(Toy, "meta"), (NoMeta, "cpu")])
def test_built_without_memory_or_on_the_cpu_if_values_are_needed(kind, device):
    module, notes = build_on_meta(kind)
    assert {parameter.device.type for parameter in module.parameters()} == {device}
    assert bool(notes) == (device == "cpu")


def test_an_error_of_the_module_is_raised():
    with pytest.raises(RuntimeError, match="the user's own error"):
        build_on_meta(lambda: Toy(fail="init"))


def test_configure_model_builds_the_blocks():
    module = Late()
    assert call_configure_model(module) == []
    assert len(module.blocks) == 3
    assert {parameter.device.type for parameter in module.parameters()} == {"meta"}
    assert call_configure_model(Toy()) == []


def needs_a_trainer(self):
    assert self.trainer.world_size


def fails(self):
    raise NotImplementedError


@pytest.mark.parametrize(("configure", "name"), [(needs_a_trainer, "`Trainer`"), (fails, "NotImplementedError")])
def test_a_configure_model_that_cannot_run_here_is_noted(configure, name):
    (note,) = call_configure_model(type("Mine", (Late,), {"configure_model": configure})())
    assert name in note


def asked(config, slots):
    return RequestedRun(run=run(), optimizer=None, config={"trainer": DEFAULTS} | config, slots=slots)


def test_labels_show_what_differs_from_the_defaults():
    path, given = "lightning_ups.callbacks.ActivationCheckpoint", ({"every_k": 3, "every": 1}, {"save": "nothing"})
    specs = [{"class_path": path, "init_args": each} for each in given]
    parts = [ActivationCheckpoint(every_k=3), ActivationCheckpoint(save="nothing")]
    found = replace(asked({"trainer": DEFAULTS | {"callbacks": specs}}, {}), run=run(callbacks=parts))
    labels = ["ActivationCheckpoint(every_k=3)", "ActivationCheckpoint(save=nothing)"]
    assert [*map(found.label, parts)] == labels
    assert found.label(Toy()) == "Toy()"


def test_a_section_left_alone_has_no_label():
    slots = {"AccelerationFlags": "flags"}
    assert asked({"flags": {"enabled": True, "tf32": None}}, slots).label(AccelerationFlags()) is None
    assert asked({"flags": {"tf32": True}}, slots).label(AccelerationFlags()) == "AccelerationFlags(tf32=True)"


def test_objects_within_objects_are_made():
    inner = {"class_path": "tests.cli_toys.Data", "init_args": {"size": 3}}
    found = instantiate({"class_path": "tests.cli_toys.Noted", "init_args": {"note": [inner, 1, {"a": None}]}})
    data, one, nothing = found.note
    assert (data.size, one, nothing) == (3, 1, {"a": None})


@pytest.mark.parametrize("precision", ["16-mixed", "16", "64-true", "bf16-true"])
def test_a_precision_is_refused_before_the_trainer_may_take_another(precision):
    settings = DEFAULTS | {"precision": precision}
    check_trainer(settings, here=True, module=Toy())
    for strategy in ("fsdp2", "simple_fsdp"):  # on a CPU a Trainer takes bf16-mixed for 16-mixed
        with pytest.raises(ValueError, match=r"FSDP2? .*Use "):
            check_trainer(settings | {"strategy": strategy}, here=True, module=Toy())
