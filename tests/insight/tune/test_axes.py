import pytest
import yaml

from lightning_ups.cli import _RequestedRunCLI
from lightning_ups.insight.tune import AXES, Axis, Setting, Situation, Space, text_of

GPU = Situation(
    on_gpu=True,
    capability=(9, 0),
    devices=4,
    most_devices=4,
    data={"batch_size": 8, "num_workers": 1},
    optimizer="torch.optim.AdamW",
    objective="cost",
    cores=8,
    has_torchao=True,
)
EVERYTHING = Space(GPU)
SETTINGS = [(axis, name) for axis, found in EVERYTHING.settings.items() for name in found]


def test_every_axis_applies_somewhere():
    assert set(EVERYTHING.settings) == {axis.name for axis in AXES}
    assert EVERYTHING.fixed == []
    assert not EVERYTHING.tree(EVERYTHING.stock)
    assert EVERYTHING.start["precision"] == "bf16"


@pytest.mark.parametrize(("axis", "name"), SETTINGS, ids=lambda value: value.replace(" ", "_"))
def test_every_setting_can_be_parsed(axis, name):
    run = {
        "model": {"class_path": "tests.cli_toys.Toy"},
        "data": {"class_path": "tests.insight.tune.injected.Sized", "init_args": {"batch_size": 8}},
        "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.1}},
        "trainer": {"accelerator": "cpu", "devices": 4},
    }
    tree = EVERYTHING.tree({**EVERYTHING.stock, axis: name})
    words = ["--config", yaml.safe_dump(run), "--config", f"{text_of(tree)}\n" if tree else "{}"]
    config = _RequestedRunCLI(args=["fit", *words]).requested.config
    assert config["optimizer"]["init_args"]["lr"] == 0.1


def test_what_the_user_sets_is_fixed():
    explicit = {"callbacks.Compile": "Compile", "flags.tf32": False, "data.batch_size": 8, "trainer.strategy": "ddp"}
    space = Space(Situation(**{**vars(GPU), "explicit": explicit, "sets_precision": True}))
    assert not {"precision", "compilation", "TF32", "microbatch", "sharding"} & set(space.settings)
    assert {"compilation", "TF32", "sharding"} <= set(space.fixed)
    assert "attention" in space.settings


def test_a_given_batch_is_traded_for_accumulation_if_asked():
    facts = {**vars(GPU), "explicit": {"data.batch_size": 8}, "keeps_global_batch": True, "accumulated": 2}
    space = Space(Situation(**facts))
    for name in space.settings["microbatch"]:
        tree = space.tree({**space.stock, "microbatch": name})
        size = tree.get("data", {}).get("init_args", {}).get("batch_size", 8)
        assert size * tree.get("trainer", {}).get("accumulate_grad_batches", 2) == 16
    assert [*space.settings["microbatch"]] == ["8", "16", "4", "2"]


def test_fewer_devices_accumulate_more():
    tree = EVERYTHING.tree({**EVERYTHING.stock, "devices": "2", "microbatch": "4"})
    assert tree["trainer"] == {"accumulate_grad_batches": 4, "devices": 2}


def test_a_cpu_has_no_axes_of_gpus():
    space = Space(Situation(data={"num_workers": 0}, cores=4))
    assert {axis: [*found] for axis, found in space.settings.items()} == {
        "precision": ["float32", "bf16"],
        "loader workers": ["0", "2", "4"],
    }


def test_a_new_axis_is_one_entry():
    axis = Axis(name="width", settings=[Setting(name="8"), Setting(name="16", yaml="model: {init_args: {width: 16}}")])
    space = Space(Situation(), [axis])
    assert space.size == 2
    assert [choice for _, choice in space.neighbors(space.stock)] == [{"width": "16"}]
    assert space.tree({"width": "16"}) == {"model": {"init_args": {"width": 16}}}
