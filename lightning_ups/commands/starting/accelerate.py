"""Settings of Accelerate, and the FSDP settings of transformers' Trainer, as a configuration of this package."""

from collections.abc import Mapping
from typing import Any

from lightning_ups.commands.starting.conversion import Conversion

_PREFIX = "fsdp_"
_SHARDING = {  # of FSDP, by name and by number
    "FULL_SHARD": "full",
    "1": "full",
    "SHARD_GRAD_OP": "gradients",
    "2": "gradients",
    "NO_SHARD": "none",
    "3": "none",
    "HYBRID_SHARD": "full",
    "4": "full",
    "HYBRID_SHARD_ZERO2": "gradients",
    "_HYBRID_SHARD_ZERO2": "gradients",
    "5": "gradients",
}
_HYBRID = ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "_HYBRID_SHARD_ZERO2", "4", "5")
_BLOCKS = "the blocks that repeat are found; FSDP2Strategy(blocks=[...]) takes patterns of their names"
_BECOMES_FSDP = {
    "version": "FSDP2Strategy is built on FSDP2",
    "auto_wrap_policy": _BLOCKS,
    "transformer_layer_cls_to_wrap": _BLOCKS,
    "min_num_params": _BLOCKS,
    "backward_prefetch": "always; FSDP2Strategy(prefetch=2) gathers further ahead",
    "backward_prefetch_policy": "always; FSDP2Strategy(prefetch=2) gathers further ahead",
    "forward_prefetch": "always; FSDP2Strategy(prefetch=2) gathers further ahead",
    "use_orig_params": "always: parameters keep their names",
    "sync_module_states": "always: rank 0 gives the initial values",
    "cpu_ram_efficient_loading": "FSDP2Strategy(meta_device=True), if configure_model builds the model",
    "limit_all_gathers": "always",
}
_NONE_FSDP = {
    "ignored_modules": "every parameter is sharded; freeze those that must not change",
    "xla": "TPUs are not supported",
    "xla_fsdp_settings": "TPUs are not supported",
    "xla_fsdp_grad_ckpt": "TPUs are not supported",
}
_LAUNCH = "`torchrun` or `srun` starts the processes of each node; alone, `fit` starts those of its machine"
_BECOMES = {
    "compute_environment": _LAUNCH,
    "machine_rank": _LAUNCH,
    "main_process_ip": _LAUNCH,
    "main_process_port": _LAUNCH,
    "main_training_function": _LAUNCH,
    "rdzv_backend": _LAUNCH,
    "same_network": _LAUNCH,
    "gpu_ids": "CUDA_VISIBLE_DEVICES, or a list in trainer.devices",
    "num_cpu_threads_per_process": "OMP_NUM_THREADS",
    "debug": "the strategies name ranks that wait for one another",
    "gradient_accumulation_steps": "trainer.accumulate_grad_batches",
    "fp8_config": "Float8Precision or TEPrecision, with arguments of their own",
}
_NONE = {
    "enable_cpu_affinity": "`numactl` binds a process to cores",
    "mpirun_config": "start by torchrun or srun",
    "ipex_config": "CPUs of Intel have no settings of their own",
    "tpu_env": "TPUs are not supported",
    "tpu_name": "TPUs are not supported",
    "tpu_zone": "TPUs are not supported",
    "tpu_use_cluster": "TPUs are not supported",
    "tpu_use_sudo": "TPUs are not supported",
    "downcast_bf16": "TPUs are not supported",
    "commands": "TPUs are not supported",
    "command_file": "TPUs are not supported",
    "megatron_lm_config": "FSDP2Strategy(tensor_parallel_size=...) splits layers; there is no pipeline parallelism",
    "deepspeed_config": "of the launcher: `torchrun` or `srun` starts the processes",
}
_DEEPSPEED = {  # keys of Accelerate, and those of DeepSpeed
    "zero_stage": "zero_optimization.stage",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
}


def is_fsdp_config(source: Mapping[str, Any]) -> bool:
    """Return whether it has the FSDP settings alone, as the argument ``fsdp_config`` of transformers' Trainer."""
    known = {*_BECOMES_FSDP, *_NONE_FSDP, "sharding_strategy", "activation_checkpointing", "state_dict_type"}
    return bool(source) and any(key.removeprefix(_PREFIX) in known for key in source)


def deepspeed_of(source: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of DeepSpeed in those of Accelerate, as DeepSpeed's own keys."""
    settings: dict[str, Any] = {}
    for key, name in _DEEPSPEED.items():
        if (value := source.get("deepspeed_config", {}).get(key)) is not None:
            *above, last = name.split(".")
            inner = settings
            for part in above:
                inner = inner.setdefault(part, {})
            inner[last] = value
    if source.get("mixed_precision") in ("bf16", "fp16"):
        settings[source["mixed_precision"]] = {"enabled": True}
    return settings


def convert_fsdp(source: Mapping[str, Any]) -> Conversion:
    """Convert FSDP settings alone."""
    found = Conversion(source)
    _fsdp(found, "", nodes=1)
    return found


def convert(source: Mapping[str, Any], *, inner: Conversion | None = None) -> Conversion:
    """Convert the YAML of Accelerate.

    Args:
        source: The settings.
        inner: The conversion of its settings of DeepSpeed.
    """
    found = Conversion(source)
    kind = str(found.value("distributed_type", "NO"))
    nodes = int(found.value("num_machines", 1))
    _devices(found, nodes, on_cpu=found.value("use_cpu") is True or kind == "MULTI_CPU")
    if inner is not None:
        found.add(inner)
        found.becomes("see the keys of DeepSpeed", *(f"deepspeed_config.{key}" for key in _DEEPSPEED))
        found.becomes("its keys are below", "deepspeed_config.deepspeed_config_file")
        found.becomes("FSDP2Strategy(meta_device=True), if configure_model builds the model",
                      "deepspeed_config.zero3_init_flag")  # fmt: skip
    elif kind == "FSDP":
        _fsdp(found, "fsdp_config.", nodes=nodes)
    elif kind.startswith("MULTI"):
        found.trainer["strategy"] = "ddp"
    if inner is None:
        _precision(found, shards=kind == "FSDP")
        if (value := found.value("gradient_accumulation_steps")) is not None:
            found.trainer["accumulate_grad_batches"] = value
    _parallelism(found)
    _dynamo(found)
    unknown = kind in ("MEGATRON_LM", "TPU", "XLA", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_HPU")
    (found.has_none if unknown else found.becomes)("trainer.strategy", "distributed_type")
    found.becomes("the precision of the settings of DeepSpeed", "mixed_precision")
    for key, text in _BECOMES.items():
        found.becomes(text, key)
    for key, text in _NONE.items():
        found.has_none(text, key)
    return found


def _devices(found: Conversion, nodes: int, *, on_cpu: bool) -> None:
    if on_cpu:
        found.trainer["accelerator"] = "cpu"
    if (processes := found.value("num_processes")) is not None:
        found.trainer["devices"] = max(int(processes) // nodes, 1)
    if nodes > 1:
        found.trainer["num_nodes"] = nodes
    found.becomes("trainer.accelerator", "use_cpu")
    found.becomes("trainer.devices, on each node", "num_processes")
    found.becomes("trainer.num_nodes", "num_machines")


def _precision(found: Conversion, *, shards: bool) -> None:
    wanted = found.value("mixed_precision", "no")
    text = "float32"
    if wanted == "fp16" and not shards:
        found.trainer["precision"], text = "16-mixed", "trainer.precision: 16-mixed"
    elif wanted in ("bf16", "fp16"):
        found.precision("BF16Precision")
        text = "BF16Precision" if wanted == "bf16" else "BF16Precision: FSDP2Strategy does not train in float16"
    elif wanted == "fp8":
        found.precision("Float8Precision")
        text = "Float8Precision"
    found.becomes(text, "mixed_precision")


def _fsdp(found: Conversion, section: str, *, nodes: int) -> None:
    def named(name: str) -> tuple[str, str]:
        return f"{section}{_PREFIX}{name}", f"{section}{name}"

    def value(name: str) -> Any:
        return next((each for each in map(found.value, named(name)) if each is not None), None)

    # In version 1 both names had the sharding strategy, and in version 2 the second is a bool.
    after = value("reshard_after_forward")
    strategy = str(after if isinstance(after, str) else value("sharding_strategy") or "FULL_SHARD").upper()
    sharding = _SHARDING.get(strategy, "full")
    settings: dict[str, Any] = {"sharding": "gradients" if after is False else sharding}
    if strategy in _HYBRID and nodes > 1:
        settings["replicate_size"] = nodes
    if value("offload_params") is True or value("cpu_offload") is True:
        settings["offload"] = True
    kind = str(value("state_dict_type") or "")
    if "FULL" in kind.upper():
        settings["save"] = "full"
    found.strategy("FSDP2Strategy", **settings)
    found.becomes(f"FSDP2Strategy(sharding={settings['sharding']})", *named("reshard_after_forward"))
    hybrid = ", with replicate_size: the number of nodes" if strategy in _HYBRID else ""
    found.becomes(f"FSDP2Strategy(sharding={settings['sharding']}){hybrid}", *named("sharding_strategy"))
    found.becomes("FSDP2Strategy(offload=...)", *named("offload_params"), *named("cpu_offload"))
    found.becomes(f"FSDP2Strategy(save={settings.get('save', 'sharded')})", *named("state_dict_type"))
    if value("activation_checkpointing") is True:
        found.callback("ActivationCheckpoint", save="nothing")
    found.becomes("ActivationCheckpoint(save=nothing), if it is on", *named("activation_checkpointing"))
    for name, text in _BECOMES_FSDP.items():
        found.becomes(text, *named(name))
    for name, text in _NONE_FSDP.items():
        found.has_none(text, *named(name))


def _parallelism(found: Conversion) -> None:
    section = "parallelism_config"
    strategy = found.trainer.get("strategy")
    for name, argument in (("dp_replicate_size", "replicate_size"), ("tp_size", "tensor_parallel_size")):
        key = f"{section}.{section}_{name}"
        size = int(found.value(key, 1))
        if size > 1 and isinstance(strategy, dict):
            settings = strategy.setdefault("init_args", {})
            settings[argument] = size
            if argument == "tensor_parallel_size":
                settings["tensor_parallel_plan"] = "llama"
        found.becomes(f"FSDP2Strategy({argument}={size})", key)
    found.becomes("the other GPUs", f"{section}.{section}_dp_shard_size")
    found.has_none("there is no context or sequence parallelism", section)


def _dynamo(found: Conversion) -> None:
    section = "dynamo_config"
    backend = str(found.value(f"{section}.dynamo_backend", found.value("dynamo_backend", "NO"))).lower()
    names = (("dynamo_mode", "mode"), ("dynamo_use_dynamic", "dynamic"), ("dynamo_use_fullgraph", "fullgraph"))
    if backend not in ("no", "none"):
        settings = {name: found.value(f"{section}.{key}") for key, name in names}
        regional = found.value(f"{section}.dynamo_use_regional_compilation") is True
        settings |= {"backend": None if backend == "inductor" else backend, "scope": None if regional else "auto"}
        found.callback("Compile", **{name: value for name, value in settings.items() if value not in (None, False)})
    found.becomes("Compile, unless it is NO", f"{section}.dynamo_backend", "dynamo_backend")
    for key, name in names:
        found.becomes(f"Compile({name}=...)", f"{section}.{key}")
    found.becomes("Compile(scope=blocks), the default", f"{section}.dynamo_use_regional_compilation")
    found.has_none("no such setting", section)
