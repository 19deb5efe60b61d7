"""What both ways of sharding share."""

from lightning_ups.transforms.sharding.materialize import Initialisation, is_on_meta, plan_initialisation
from lightning_ups.transforms.sharding.mesh import (
    DATA,
    TENSOR,
    MeshSizes,
    build_mesh,
    data_mesh,
    device_of,
    least_of_ranks,
    local_part,
    num_shares,
    part_of,
    shard_alike,
    unsharded,
)
from lightning_ups.transforms.sharding.optimizer_step import StepState, explaining_shards, one_kind_at_a_time
from lightning_ups.transforms.sharding.replicated import (
    BufferSync,
    average_gradients,
    check_one_batch,
    give_first,
    on_any_rank,
    share_random_state,
)
from lightning_ups.transforms.sharding.sharded_before import (
    GatherOptions,
    ShardRecord,
    check_same,
    layout_of,
    recall,
    refuse_unshardable,
    remember,
)

__all__ = [
    "DATA",
    "TENSOR",
    "BufferSync",
    "GatherOptions",
    "Initialisation",
    "MeshSizes",
    "ShardRecord",
    "StepState",
    "average_gradients",
    "build_mesh",
    "check_one_batch",
    "check_same",
    "data_mesh",
    "device_of",
    "explaining_shards",
    "give_first",
    "is_on_meta",
    "layout_of",
    "least_of_ranks",
    "local_part",
    "num_shares",
    "on_any_rank",
    "one_kind_at_a_time",
    "part_of",
    "plan_initialisation",
    "recall",
    "refuse_unshardable",
    "remember",
    "shard_alike",
    "share_random_state",
    "unsharded",
]
