import pytest
import yaml
from lightning.pytorch import Callback, Trainer

from lightning_ups.cli import _RequestedRunCLI
from lightning_ups.insight.tune import AXES, Axis, Setting, Situation, Space, leaves, text_of
from lightning_ups.order import refusals
from tests.cli_toys import Toy
from tests.insight.tune.injected import Sized

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
def test_every_setting_can_be_parsed_and_is_not_refused(axis, name):
    run = {
        "model": {"class_path": "tests.cli_toys.Toy"},
        "data": {"class_path": "tests.insight.tune.injected.Sized", "init_args": {"batch_size": 8}},
        "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.1}},
        "trainer": {"accelerator": "gpu", "devices": 4},
    }
    tree = EVERYTHING.tree({**EVERYTHING.stock, axis: name})
    words = ["--config", yaml.safe_dump(run), "--config", f"{text_of(tree)}\n" if tree else "{}"]
    requested = _RequestedRunCLI(args=["fit", *words]).requested
    assert requested.config["optimizer"]["init_args"]["lr"] == 0.1
    assert [refusal.text(requested.run) for refusal in refusals(requested.run)] == []
    for key, value in leaves(tree):  # the run has what the setting asks for
        section, _, rest = key.partition(".")
        if not rest.startswith(("callbacks", "plugins", "strategy")):
            assert _at(requested.config[section], rest.split(".")) == value
    given = {type(part).__name__ for part in (*requested.run.callbacks, requested.run.precision)}
    for spec in (spec for key in ("callbacks+", "plugins+") for spec in tree.get("trainer", {}).get(key, ())):
        assert spec["class_path"] in given


def _at(config, keys):
    return _at(config[keys[0]], keys[1:]) if keys else config


def test_what_the_user_sets_is_fixed():
    explicit = {"callbacks.Compile": "Compile", "flags.tf32": False, "data.batch_size": 8, "trainer.strategy": "ddp"}
    space = Space(Situation(**{**vars(GPU), "explicit": explicit, "sets_precision": True}))
    assert not {"precision", "compilation", "TF32", "microbatch", "sharding"} & set(space.settings)
    assert {"precision", "compilation", "TF32", "microbatch", "sharding"} <= set(space.fixed)
    assert "attention" in space.settings


def test_a_given_batch_is_traded_for_accumulation_if_asked():
    facts = {**vars(GPU), "explicit": {"data.batch_size": 8}, "keeps_global_batch": True, "accumulated": 2}
    space = Space(Situation(**facts))
    for name in space.settings["microbatch"]:
        tree = space.tree({**space.stock, "microbatch": name})
        size = tree.get("data", {}).get("init_args", {}).get("batch_size", 8)
        assert size * tree.get("trainer", {}).get("accumulate_grad_batches", 2) == 16
    assert [*space.settings["microbatch"]] == ["8", "16", "4", "2"]


class Counting(Callback):
    """Counts samples at each optimizer step, epoch and validation."""

    def __init__(self):
        self.samples, self.steps, self.epochs, self.validations, self.validated = 0, [], [], [], 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.samples += len(batch)
        if trainer.global_step > len(self.steps):
            self.steps.append(self.samples)

    def on_train_epoch_end(self, *_):
        self.epochs.append(self.samples)

    def on_validation_start(self, *_):
        self.validations.append(self.samples)

    def on_validation_batch_start(self, trainer, pl_module, batch, *_):
        self.validated += len(batch)


class Both(Sized):
    def val_dataloader(self):
        return self.train_dataloader()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "limits",
    [
        {"limit_train_batches": 8, "val_check_interval": 4, "limit_val_batches": 2},
        {"val_check_interval": 6, "check_val_every_n_epoch": None, "limit_val_batches": 4},
        {"limit_train_batches": 0.5, "val_check_interval": 0.5},
    ],
)
def test_another_microbatch_sees_the_same_samples(limits):
    trainer = {"accumulate_grad_batches": 2, "max_steps": 10, **limits}
    facts = {"data": {"batch_size": 8}, "explicit": {"data.batch_size": 8}, "keeps_global_batch": True}
    space = Space(Situation(accumulated=2, trainer=trainer, **facts))
    assert [*space.settings["microbatch"]] == ["8", "16", "4", "2"]
    seen = []
    for name in ("8", "16", "4", "2"):
        tree = space.tree({**space.stock, "microbatch": name})
        size = tree.get("data", {"init_args": {"batch_size": 8}})["init_args"]["batch_size"]
        count = Counting()
        alone = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
        alone |= {"num_sanity_val_steps": 0, "enable_model_summary": False, "callbacks": [count]}
        Trainer(**{**trainer, **tree.get("trainer", {})}, **alone).fit(Toy(), Both(batch_size=size, size=320))
        seen.append((count.steps, count.epochs, count.validations, count.validated))
    assert all(each == seen[0] for each in seen[1:])
    assert len(seen[0][2]) > 1


def test_a_microbatch_at_which_an_epoch_cannot_have_the_same_samples_is_not_tried():
    facts = {
        "data": {"batch_size": 8},
        "accumulated": 2,
        "trainer": {"limit_train_batches": 5, "val_check_interval": 1.0},
    }
    space = Space(Situation(**facts))
    assert [choice["microbatch"] for _, choice in space.neighbors(space.stock) if choice["microbatch"] != "8"] == [
        "4",
        "2",
    ]
    assert space.tree({**space.stock, "microbatch": "4"})["trainer"] == {
        "accumulate_grad_batches": 4,
        "limit_train_batches": 10,
    }


@pytest.mark.parametrize("key", ["data.batch_size", "trainer.accumulate_grad_batches", "trainer.limit_train_batches"])
def test_options_that_no_file_can_replace_keep_the_microbatch(key):
    facts = {
        **vars(GPU),
        "explicit": {key: 1},
        "accumulated": 2,
        "keeps_global_batch": True,
        "trainer": {"limit_train_batches": 10},
    }
    assert "microbatch" in Space(Situation(**facts)).settings
    typed = Space(Situation(**{**facts, "typed": [key]}))
    assert not {"microbatch", "devices"} & set(typed.settings)
    share = Situation(**{**facts, "trainer": {"limit_train_batches": 0.5}, "typed": ["trainer.limit_train_batches"]})
    assert "microbatch" in Space(share).settings


def test_other_counts_of_devices_keep_the_samples_of_a_step_and_of_an_epoch():
    facts = {**vars(GPU), "most_devices": 8, "trainer": {"limit_train_batches": 100, "val_check_interval": 50}}
    space = Space(Situation(**facts))
    tree = space.tree({**space.stock, "devices": "2"})
    assert tree["trainer"] == {
        "devices": 2,
        "accumulate_grad_batches": 2,
        "limit_train_batches": 200,
        "val_check_interval": 100,
    }
    assert not space.keeps_samples({**space.stock, "devices": "8"}), "a step would have more samples"
    assert "8" not in [choice["devices"] for _, choice in space.neighbors(space.stock)]
    both = space.tree({**space.stock, "devices": "8", "microbatch": "4"})["trainer"]
    assert both == {"devices": 8}, "nothing changes with half the microbatch on twice the devices"


def test_fewer_devices_accumulate_more():
    tree = EVERYTHING.tree({**EVERYTHING.stock, "devices": "2", "microbatch": "4"})
    assert tree["trainer"] == {"accumulate_grad_batches": 4, "devices": 2}


@pytest.mark.parametrize("facts", [{"capability": (8, 6)}, {"has_torchao": False}, {"on_gpu": False}])
def test_float8_is_tried_only_where_it_runs(facts):
    found = Space(Situation(**{**vars(GPU), **facts})).settings["precision"]
    assert "bf16" in found
    assert not any(name.startswith("float8") for name in found)


@pytest.mark.parametrize(("batch", "ahead"), [(None, False), (8, True)])
def test_settings_that_only_save_memory_need_something_to_spend_it_on(batch, ahead):
    facts = {**vars(GPU), "devices": 1, "most_devices": 1, "objective": "throughput", "data": {"batch_size": batch}}
    axes = Space(Situation(**facts)).settings
    assert ("recomputation" in axes) == ahead
    assert ("optimizer state" in axes) == ahead


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
