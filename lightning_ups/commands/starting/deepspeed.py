"""Settings of DeepSpeed, as a configuration of this package."""

from collections.abc import Mapping
from typing import Any

from lightning_ups.commands.starting.conversion import Conversion

_ZERO = "zero_optimization"
_ALWAYS = "always on under FSDP2Strategy"
_BLOCKS = "blocks are gathered one by one; FSDP2Strategy(blocks=..., prefetch=...) says which and how many ahead"
_BECOMES = {
    f"{_ZERO}.overlap_comm": _ALWAYS,
    f"{_ZERO}.contiguous_gradients": _ALWAYS,
    f"{_ZERO}.reduce_scatter": _ALWAYS,
    f"{_ZERO}.allgather_partitions": _ALWAYS,
    f"{_ZERO}.round_robin_gradients": "not needed: every parameter is sharded over all ranks",
    f"{_ZERO}.reduce_bucket_size": _BLOCKS,
    f"{_ZERO}.allgather_bucket_size": _BLOCKS,
    f"{_ZERO}.stage3_prefetch_bucket_size": _BLOCKS,
    f"{_ZERO}.stage3_max_live_parameters": _BLOCKS,
    f"{_ZERO}.stage3_max_reuse_distance": "FSDP2Strategy(reshard_after_forward=...)",
    f"{_ZERO}.stage3_gather_16bit_weights_on_model_save": "`export CHECKPOINT --dtype bfloat16` writes whole weights",
    f"{_ZERO}.stage3_gather_fp16_weights_on_model_save": "`export CHECKPOINT --dtype float16` writes whole weights",
    f"{_ZERO}.sub_group_size": "OptimizerOffload(chunk_mb=...)",
    f"{_ZERO}.ignore_unused_parameters": "FSDP2Strategy(unused_parameters=True), if ranks use different parameters",
    f"{_ZERO}.elastic_checkpoint": "always: a checkpoint loads on any number of GPUs",
    f"{_ZERO}.load_from_fp32_weights": "always: checkpoints have float32 weights",
    "train_batch_size": "batch_size of your data x accumulate_grad_batches x GPUs; no key of its own",
    "train_micro_batch_size_per_gpu": "batch_size of your data",
    "wall_clock_breakdown": "`diagnose`, or the callback TrainingReport",
    "memory_breakdown": "`plan`, or the callback MemoryForensics",
    "flops_profiler": "the section `throughput`, on by default",
    "tensorboard": "trainer.logger: TensorBoardLogger, on by default",
    "csv_monitor": "trainer.logger: CSVLogger, on by default",
    "wandb": "trainer.logger: WandbLogger",
    "comet": "trainer.logger: CometLogger",
    "zero_allow_untested_optimizer": "optimizers are tried when they make their first step",
    "zero_force_ds_cpu_optimizer": "optimizers are tried when they make their first step",
    "communication_data_type": "gradients are reduced in float32",
    "data_types.grad_accum_dtype": "gradients are accumulated in float32",
    "gradient_predivide_factor": "gradients are averaged in float32",
    "prescale_gradients": "gradients are averaged in float32",
    "checkpoint": "FSDP2Strategy(save=..., async_save=...)",
    "autotuning": "`tune`",
    "tensor_parallel": "FSDP2Strategy(tensor_parallel_size=..., tensor_parallel_plan=...)",
    "seed": "seed_everything",
    "dump_state": "`explain` prints the configuration",
}
_NONE = {
    f"{_ZERO}.stage3_param_persistence_threshold": "small parameters are gathered with their block",
    f"{_ZERO}.stage3_model_persistence_threshold": "small parameters are gathered with their block",
    f"{_ZERO}.zero_quantized_weights": "Float8Precision gathers float8 weights, as another precision",
    f"{_ZERO}.zero_quantized_nontrainable_weights": "weights are not quantized",
    f"{_ZERO}.zero_quantized_gradients": "gradients are reduced in float32",
    f"{_ZERO}.mics_shard_size": "FSDP2Strategy(replicate_size=...), the number of GPUs divided by it, is close",
    f"{_ZERO}.mics_hierarchical_params_gather": "FSDP2Strategy(replicate_size=...) is close",
    "scheduler": "learning rates by step come from configure_optimizers, with interval='step'",
    "fp16": "bfloat16 needs no loss scale",
    "amp": "bfloat16 needs no loss scale",
    "bf16": "no such setting",
    "activation_checkpointing": "no such setting",
    "comms_logger": "`diagnose` measures the time of communication",
    "aio": "nothing is kept on NVMe",
    "pipeline": "there is no pipeline parallelism",
    "elasticity": "start again with --ckpt_path, on any number of GPUs",
    "compression_training": "no such training",
    "sparse_attention": "use attention masks of your model",
    "sparse_gradients": "gradients are reduced as dense tensors",
    "curriculum_learning": "a matter of the data",
    "data_efficiency": "a matter of the data",
    "hybrid_engine": "no such engine",
}
_OPTIMIZERS = {"adam": "AdamW", "adamw": "AdamW", "sgd": "SGD", "adagrad": "Adagrad"}


def convert(source: Mapping[str, Any]) -> Conversion:
    """Convert the JSON of DeepSpeed."""
    found = Conversion(source)
    stage = int(found.value(f"{_ZERO}.stage", 0))
    offloads = _offloaded(found, "optimizer") or bool(found.value(f"{_ZERO}.cpu_offload"))
    if stage == 1 and offloads:
        stage = 2  # TunedDDPStrategy does not offload the state that it shards
    _optimizer(found)
    _precision(found, stage)
    _strategy(found, stage, offloads=offloads)
    _checkpointing(found)
    for key, name in (
        ("gradient_accumulation_steps", "accumulate_grad_batches"),
        ("gradient_clipping", "gradient_clip_val"),
        ("steps_per_print", "log_every_n_steps"),
    ):
        if (value := found.value(key)) is not None:
            found.trainer[name] = value
        found.becomes(f"trainer.{name}", key)
    if found.value("seed") is not None:
        found.sections["seed_everything"] = found.value("seed")
    for key, text in _BECOMES.items():
        found.becomes(text, key)
    for key, text in _NONE.items():
        found.has_none(text, key)
    return found


def _offloaded(found: Conversion, part: str) -> bool:
    return found.value(f"{_ZERO}.offload_{part}.device", "none") != "none"


def _strategy(found: Conversion, stage: int, *, offloads: bool) -> None:
    offloads_parameters = stage == 3 and _offloaded(found, "param")  # else DeepSpeed ignores it
    if stage == 0:
        found.trainer["strategy"] = text = "ddp"
    elif stage == 1:
        found.strategy("TunedDDPStrategy", shard_optimizer_state=True)
        text = "TunedDDPStrategy(shard_optimizer_state=True)"
    else:
        settings: dict[str, Any] = {"sharding": "full" if stage == 3 else "gradients"}
        text = f"FSDP2Strategy(sharding={settings['sharding']})"
        if (size := found.value(f"{_ZERO}.zero_hpz_partition_size", 1)) > 1 and stage == 3:
            settings["reshard_after_forward"] = size
        if offloads_parameters:
            settings["offload"] = True
        found.strategy("FSDP2Strategy", **settings)
    found.becomes(text, f"{_ZERO}.stage")
    found.becomes("FSDP2Strategy(reshard_after_forward=...)", f"{_ZERO}.zero_hpz_partition_size")
    in_host = "FSDP2Strategy(offload=True): parameters, gradients and optimizer state are in host memory"
    resident = found.value(f"{_ZERO}.offload_optimizer.ratio", 1.0)
    if offloads_parameters:
        found.becomes(in_host, f"{_ZERO}.offload_param.device", f"{_ZERO}.offload_optimizer.device")
    elif offloads:
        share = {"resident": round(1 - resident, 3)} if resident < 1 else {}
        found.callback("OptimizerOffload", update="device" if share else "host", **share)
        found.becomes("OptimizerOffload, which on a fast link is faster with update: device",
                      f"{_ZERO}.offload_optimizer.device", f"{_ZERO}.cpu_offload")  # fmt: skip
        found.becomes("OptimizerOffload(resident=...)", f"{_ZERO}.offload_optimizer.ratio")
    for part in ("offload_param", "offload_optimizer"):
        found.becomes("nothing is offloaded", f"{_ZERO}.{part}.device")
        found.becomes("host memory is always pinned", f"{_ZERO}.{part}.pin_memory")
        found.has_none("host memory is allocated as needed, and nothing is kept on NVMe", f"{_ZERO}.{part}")


def _precision(found: Conversion, stage: int) -> None:
    in_bf16 = bool(found.value("bf16.enabled") or found.value("bfloat16.enabled"))
    in_fp16 = bool(found.value("fp16.enabled") or found.value("amp.enabled")) and not in_bf16
    weights = "autocast" if stage == 1 else "masters"  # TunedDDPStrategy does not shard the state of masters
    if in_bf16 or (in_fp16 and stage > 1):
        found.precision("BF16Precision", weights=weights)
    elif in_fp16:
        found.trainer["precision"] = "16-mixed"
    text = f"BF16Precision(weights={weights})"
    found.becomes(text if in_bf16 else "not used", "bf16.enabled", "bfloat16.enabled")
    text = f"{text}: strategies that shard do not train in float16" if stage > 1 else "trainer.precision: 16-mixed"
    found.becomes(text if in_fp16 else "not used", "fp16.enabled", "amp.enabled")


def _optimizer(found: Conversion) -> None:
    kind = found.value("optimizer.type")
    if kind is None:
        found.has_none("no class is named", "optimizer")
        return
    name = _OPTIMIZERS.get(str(kind).lower())
    if name == "AdamW" and found.value("optimizer.params.adam_w_mode") is False:
        name = "Adam"
    if name is None:
        found.has_none("another optimizer: name a class of torch in the section `optimizer`", "optimizer")
        return
    known = ("lr", "betas", "eps", "weight_decay", "momentum", "nesterov", "amsgrad", "lr_decay")
    given = {key: found.value(f"optimizer.params.{key}") for key in known}
    settings = {key: value for key, value in given.items() if value is not None}
    found.sections["optimizer"] = {"class_path": f"torch.optim.{name}", **({"init_args": settings} if settings else {})}
    found.becomes(f"optimizer: torch.optim.{name}", "optimizer.type", "optimizer.params.adam_w_mode")
    for key in known:
        found.becomes(f"optimizer.init_args.{key}", f"optimizer.params.{key}")
    found.has_none("the optimizer is torch's own", "optimizer.params")


def _checkpointing(found: Conversion) -> None:
    section = "activation_checkpointing"
    keys = ("partition_activations", "cpu_checkpointing", "number_checkpoints", "contiguous_memory_optimization")
    if not any(found.value(f"{section}.{key}") for key in keys):
        found.becomes("nothing is recomputed", *(f"{section}.{key}" for key in keys))
        return
    found.callback("ActivationCheckpoint", save="nothing")
    if found.value(f"{section}.cpu_checkpointing"):
        found.callback("ActivationOffload")
    found.becomes("ActivationCheckpoint recomputes each block; remove deepspeed.checkpointing from the model",
                  f"{section}.number_checkpoints")  # fmt: skip
    found.becomes("ActivationOffload", f"{section}.cpu_checkpointing")
    found.has_none("ActivationCheckpoint recomputes each block, with its inputs kept on each GPU", section)
