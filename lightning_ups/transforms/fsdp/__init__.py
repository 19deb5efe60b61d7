"""Sharding with `fully_shard`, and the checks around it."""

from lightning_ups.transforms.fsdp.accumulate import (
    Accumulation,
    LateGradients,
    Sync,
    SyncChoice,
    choose_sync,
    free_memory,
    unsharded_gradient_bytes,
)
from lightning_ups.transforms.fsdp.collective_order import CollectiveOrder
from lightning_ups.transforms.fsdp.external_reads import ExternalReads
from lightning_ups.transforms.fsdp.gathered_together import gather_with_blocks, gathered_when_called
from lightning_ups.transforms.fsdp.interrupts import keeping_interrupt
from lightning_ups.transforms.fsdp.keeping import choose_keeping, gathered_bytes, keep_gathered, least_headroom
from lightning_ups.transforms.fsdp.manual_writes import ManualWrites, refuse_replaced
from lightning_ups.transforms.fsdp.model_forward import ModelForward
from lightning_ups.transforms.fsdp.shard_copy import shard_alike
from lightning_ups.transforms.fsdp.sharding import Sharded, ShardOptions, is_sharded, shard, sharded, unsharded
from lightning_ups.transforms.fsdp.shown_gradients import ShownGradients
from lightning_ups.transforms.fsdp.stalls import StallWatch
from lightning_ups.transforms.fsdp.step_check import StepCheck

__all__ = [
    "Accumulation",
    "CollectiveOrder",
    "ExternalReads",
    "LateGradients",
    "ManualWrites",
    "ModelForward",
    "ShardOptions",
    "Sharded",
    "ShownGradients",
    "StallWatch",
    "StepCheck",
    "Sync",
    "SyncChoice",
    "choose_keeping",
    "choose_sync",
    "free_memory",
    "gather_with_blocks",
    "gathered_bytes",
    "gathered_when_called",
    "is_sharded",
    "keep_gathered",
    "keeping_interrupt",
    "least_headroom",
    "refuse_replaced",
    "shard",
    "shard_alike",
    "sharded",
    "unsharded",
    "unsharded_gradient_bytes",
]
