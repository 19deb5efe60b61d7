import pytest

from lightning_ups.commands.starting.accelerate import convert, convert_fsdp, deepspeed_of, is_fsdp_config


def fsdp(**settings):
    found = convert_fsdp(settings).trainer
    return found["strategy"]["init_args"], found.get("callbacks+", [])


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ({"fsdp_sharding_strategy": "FULL_SHARD"}, {"sharding": "full"}),
        ({"fsdp_sharding_strategy": 2}, {"sharding": "gradients"}),
        ({"fsdp_version": 2, "fsdp_reshard_after_forward": False}, {"sharding": "gradients"}),
        ({"fsdp_version": 2, "fsdp_reshard_after_forward": True}, {"sharding": "full"}),
        ({"fsdp_reshard_after_forward": "NO_SHARD"}, {"sharding": "none"}),
        ({"fsdp_offload_params": True, "fsdp_state_dict_type": "FULL_STATE_DICT"},
         {"sharding": "full", "offload": True, "save": "full"}),
        ({"state_dict_type": "SHARDED_STATE_DICT"}, {"sharding": "full"}),
    ],
)  # fmt: skip
def test_sharding(source, expected):
    assert fsdp(**source) == (expected, [])


def test_recomputation():
    assert fsdp(activation_checkpointing=True)[1] == [
        {"class_path": "ActivationCheckpoint", "init_args": {"save": "nothing"}}
    ]


def test_hybrid_sharding_copies_the_model_once_on_each_node():
    source = {"distributed_type": "FSDP", "num_machines": 2, "num_processes": 16, "mixed_precision": "fp16",
              "fsdp_config": {"fsdp_sharding_strategy": "HYBRID_SHARD"}}  # fmt: skip
    found = convert(source).trainer
    assert found["strategy"]["init_args"] == {"sharding": "full", "replicate_size": 2}
    assert (found["devices"], found["num_nodes"]) == (8, 2)
    assert found["plugins"] == [{"class_path": "BF16Precision"}]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ({"distributed_type": "MULTI_GPU", "num_processes": 4, "mixed_precision": "fp16"},
         {"accelerator": "gpu", "devices": 4, "strategy": "ddp", "precision": "16-mixed"}),
        ({"distributed_type": "NO", "use_cpu": True, "gradient_accumulation_steps": 4},
         {"accelerator": "cpu", "accumulate_grad_batches": 4}),
        ({"distributed_type": "NO", "dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_use_dynamic": False}},
         {"accelerator": "gpu", "callbacks+": [{"class_path": "Compile", "init_args": {"scope": "auto"}}]}),
    ],
)  # fmt: skip
def test_other_kinds(source, expected):
    assert convert(source).trainer == expected


def test_parallelism():
    sizes = {"dp_replicate_size": 2, "dp_shard_size": 4, "tp_size": 2, "cp_size": 1}
    source = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2},
              "parallelism_config": {f"parallelism_config_{name}": size for name, size in sizes.items()}}  # fmt: skip
    assert convert(source).trainer["strategy"]["init_args"] == {
        "sharding": "full", "replicate_size": 2, "tensor_parallel_size": 2, "tensor_parallel_plan": "llama",
    }  # fmt: skip


def test_keys_of_deepspeed_have_its_own_names():
    source = {"mixed_precision": "bf16", "deepspeed_config": {"zero_stage": 2, "offload_optimizer_device": "cpu"}}
    assert deepspeed_of(source) == {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "bf16": {"enabled": True},
    }  # fmt: skip


def test_settings_of_fsdp_alone_are_known():
    assert is_fsdp_config({"backward_prefetch": "backward_pre"})
    assert not is_fsdp_config({"model": {}})
    assert not is_fsdp_config({})
