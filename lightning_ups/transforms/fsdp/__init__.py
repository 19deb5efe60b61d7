"""Sharding with `fully_shard`, and the checks around it."""

from lightning_ups.transforms.fsdp.collective_order import CollectiveOrder
from lightning_ups.transforms.fsdp.external_reads import ExternalReads
from lightning_ups.transforms.fsdp.memory_choices import (
    Sync,
    choose_keeping,
    choose_sync,
    free_memory,
    gathered_bytes,
    keep_gathered,
    least_headroom,
    unsharded_gradient_bytes,
)
from lightning_ups.transforms.fsdp.model_forward import (
    ModelForward,
    ShownGradients,
    gather_with_blocks,
    gathered_when_called,
)
from lightning_ups.transforms.fsdp.sharding import Sharded, ShardOptions, is_sharded, shard, sharded
from lightning_ups.transforms.fsdp.step_checks import ManualWrites, refuse_late_gradients, refuse_replaced

__all__ = [
    "CollectiveOrder",
    "ExternalReads",
    "ManualWrites",
    "ModelForward",
    "ShardOptions",
    "Sharded",
    "ShownGradients",
    "Sync",
    "choose_keeping",
    "choose_sync",
    "free_memory",
    "gather_with_blocks",
    "gathered_bytes",
    "gathered_when_called",
    "is_sharded",
    "keep_gathered",
    "least_headroom",
    "refuse_late_gradients",
    "refuse_replaced",
    "shard",
    "sharded",
    "unsharded_gradient_bytes",
]
