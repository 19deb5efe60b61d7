import pytest

from lightning_ups.commands.starting.deepspeed import convert


def trainer(**source):
    return convert(source).trainer


@pytest.mark.parametrize(
    ("zero", "strategy"),
    [
        ({"stage": 0}, "ddp"),
        ({"stage": 1}, {"class_path": "TunedDDPStrategy", "init_args": {"shard_optimizer_state": True}}),
        ({"stage": 2}, {"class_path": "FSDP2Strategy", "init_args": {"sharding": "gradients"}}),
        ({"stage": 3}, {"class_path": "FSDP2Strategy", "init_args": {"sharding": "full"}}),
        (
            {"stage": 2, "zero_hpz_partition_size": 8, "offload_param": {"device": "cpu"}},
            {"class_path": "FSDP2Strategy", "init_args": {"sharding": "gradients"}},
        ),
        (
            {"stage": 3, "zero_hpz_partition_size": 8},
            {"class_path": "FSDP2Strategy", "init_args": {"sharding": "full", "reshard_after_forward": 8}},
        ),
        (
            {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}},
            {"class_path": "FSDP2Strategy", "init_args": {"sharding": "full", "offload": True}},
        ),
    ],
)
def test_stages(zero, strategy):
    found = trainer(zero_optimization=zero)
    assert found["strategy"] == strategy
    assert "callbacks+" not in found


@pytest.mark.parametrize(
    ("offload", "settings"),
    [
        ({"device": "cpu"}, {"update": "host"}),
        ({"device": "nvme", "ratio": 0.3}, {"update": "device", "resident": 0.7}),
    ],
)
@pytest.mark.parametrize("stage", [1, 2])
def test_the_optimizer_alone_is_offloaded(offload, settings, stage):
    found = trainer(zero_optimization={"stage": stage, "offload_optimizer": offload})
    assert found["strategy"] == {"class_path": "FSDP2Strategy", "init_args": {"sharding": "gradients"}}
    assert found["callbacks+"] == [{"class_path": "OptimizerOffload", "init_args": settings}]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            {"bf16": {"enabled": True}},
            {"plugins": [{"class_path": "BF16Precision", "init_args": {"weights": "masters"}}]},
        ),
        (
            {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}},
            {"plugins": [{"class_path": "BF16Precision", "init_args": {"weights": "autocast"}}]},
        ),
        ({"bf16": {"enabled": "auto"}}, {}),
        ({"fp16": {"enabled": True}}, {"precision": "16-mixed"}),
        (
            {"fp16": {"enabled": True}, "zero_optimization": {"stage": 3}},
            {"plugins": [{"class_path": "BF16Precision", "init_args": {"weights": "masters"}}]},
        ),
    ],
)
def test_precisions(source, expected):
    found = trainer(**source)
    assert {key: found[key] for key in ("precision", "plugins") if key in found} == expected


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        ({"type": "Adam", "params": {"lr": 1e-4, "betas": [0.9, 0.95]}}, ("AdamW", {"lr": 1e-4, "betas": [0.9, 0.95]})),
        ({"type": "Adam", "params": {"lr": "auto", "adam_w_mode": False}}, ("Adam", None)),
        ({"type": "OneBitAdam", "params": {"lr": 1e-4}}, None),
    ],
)
def test_optimizers(optimizer, expected):
    found = convert({"optimizer": optimizer}).sections.get("optimizer")
    assert (found and (found["class_path"].rpartition(".")[2], found.get("init_args"))) == expected


def test_the_rest_of_the_trainer_and_recomputation():
    found = trainer(
        gradient_accumulation_steps=4,
        gradient_clipping=1.0,
        steps_per_print="auto",
        activation_checkpointing={"partition_activations": True, "cpu_checkpointing": True},
    )
    assert (found["accumulate_grad_batches"], found["gradient_clip_val"]) == (4, 1.0)
    assert "log_every_n_steps" not in found
    assert [each["class_path"] for each in found["callbacks+"]] == ["ActivationCheckpoint", "ActivationOffload"]
