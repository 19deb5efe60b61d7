import json
import re

import pytest
import yaml

from lightning_ups.__main__ import main
from tests.command import DATA, MODEL

AUTO = "auto"
DEEPSPEED = {  # as the pages of transformers and DeepSpeed have it
    "fp16": {"enabled": AUTO, "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1},
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": AUTO}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 500}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True, "buffer_count": 5},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": AUTO,
        "stage3_prefetch_bucket_size": 5e8,
        "stage3_param_persistence_threshold": 1e6,
        "stage3_max_live_parameters": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": 8,
    "gradient_clipping": 1.0,
    "steps_per_print": 200,
    "train_batch_size": AUTO,
    "train_micro_batch_size_per_gpu": 2,
    "wall_clock_breakdown": False,
    "a_new_key": {"of": "another year"},
}
ZERO_1 = {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}
ZERO_2 = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "bf16": {"enabled": True}}
FSDP_1 = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "distributed_type": "FSDP",
    "downcast_bf16": "no",
    "enable_cpu_affinity": False,
    "fsdp_config": {
        "fsdp_activation_checkpointing": True,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_backward_prefetch": "BACKWARD_PRE",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_forward_prefetch": False,
        "fsdp_offload_params": False,
        "fsdp_sharding_strategy": "SHARD_GRAD_OP",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_sync_module_states": True,
        "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
        "fsdp_use_orig_params": True,
    },
    "dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_mode": "default", "dynamo_use_dynamic": False},
    "machine_rank": 0,
    "main_training_function": "main",
    "mixed_precision": "bf16",
    "num_machines": 2,
    "num_processes": 8,
    "rdzv_backend": "static",
    "same_network": True,
    "use_cpu": False,
}
OF_DEEPSPEED = {
    "compute_environment": "LOCAL_MACHINE",
    "deepspeed_config": {
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        "offload_optimizer_device": "none",
        "offload_param_device": "none",
        "zero3_init_flag": True,
        "zero3_save_16bit_model": True,
        "zero_stage": 3,
    },
    "distributed_type": "DEEPSPEED",
    "mixed_precision": "bf16",
    "num_machines": 1,
    "num_processes": 8,
    "use_cpu": False,
}
FSDP_ALONE = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "backward_prefetch": "backward_pre", "xla": False}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    return tmp_path


def migrated(source, capsys, name="settings.json"):
    with open(name, "w") as file:
        (json if name.endswith("json") else yaml).dump(source, file)
    assert main(["migrate", name]) == 0
    return capsys.readouterr().out


def leaves(tree):
    for key, value in tree.items():
        yield from leaves(value) if isinstance(value, dict) else [key]


@pytest.mark.parametrize(
    "source", [DEEPSPEED, ZERO_1, ZERO_2, FSDP_1, OF_DEEPSPEED, FSDP_ALONE], ids=["3", "1", "2", "fsdp", "of", "alone"]
)
def test_no_key_is_dropped_and_the_result_is_a_configuration(source, folder, capsys):
    text = migrated(source, capsys, "settings.json" if source in (DEEPSPEED, ZERO_1) else "settings.yaml")
    for key in leaves(source):
        assert re.search(rf"^# - (\S+\.)?{key}: ", text, re.MULTILINE), key
    (folder / "run.yaml").write_text(yaml.safe_dump({"model": MODEL, "data": DATA}))
    (folder / "converted.yaml").write_text(text)
    assert main(["explain", "--config", "run.yaml", "--config", "converted.yaml", "--trainer.devices", "4"]) == 0, (
        capsys.readouterr().out
    )


def test_a_key_that_is_not_known_is_reported(capsys):
    assert "# - a_new_key.of: another year -> unknown to this command\n" in migrated(DEEPSPEED, capsys)


def test_the_settings_of_accelerate_may_name_a_file_of_deepspeed(folder, capsys):
    (folder / "ds.json").write_text(json.dumps(ZERO_2))
    source = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "ds.json"}}
    trainer = yaml.safe_load(migrated(source, capsys))["trainer"]
    assert trainer["strategy"]["init_args"] == {"sharding": "gradients"}


@pytest.mark.parametrize(("text", "part"), [("{", "neither JSON nor YAML"), ("model: 1", "no key"), ("- 1", "no keys")])
def test_what_is_not_such_a_file(text, part, folder, capsys):
    (folder / "a.json").write_text(text)
    assert main(["migrate", "a.json"]) == 2
    assert part in " ".join(capsys.readouterr().err.split())


def test_a_missing_file(capsys):
    assert main(["migrate", "b.json"]) == 2
    assert "There is no file" in capsys.readouterr().err
