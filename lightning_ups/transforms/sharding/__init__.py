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
)
from lightning_ups.transforms.sharding.mixed_step import one_kind_at_a_time
from lightning_ups.transforms.sharding.one_batch import check_one_batch, share_random_state
from lightning_ups.transforms.sharding.replicated import BufferSync, average_gradients, give_first, on_any_rank
from lightning_ups.transforms.sharding.sharded_before import (
    GatherOptions,
    ShardRecord,
    check_same,
    layout_of,
    recall,
    refuse_hooks_after,
    refuse_lazy,
    refuse_one_memory,
    remember,
)
from lightning_ups.transforms.sharding.sharded_step import explaining_shards
from lightning_ups.transforms.sharding.step_state import StepState

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
    "refuse_hooks_after",
    "refuse_lazy",
    "refuse_one_memory",
    "remember",
    "share_random_state",
]
