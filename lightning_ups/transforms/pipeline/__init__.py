"""Pipeline parallelism: divides the blocks of a model, and a training step with them, into stages."""

from lightning_ups.transforms.pipeline.batches import split_batch
from lightning_ups.transforms.pipeline.cut import (
    SCHEDULES,
    Cut,
    Schedule,
    absent_state,
    cut_model,
    cut_of,
    drop_others,
    showing_others,
)
from lightning_ups.transforms.pipeline.schedules import Stage, build_schedule
from lightning_ups.transforms.pipeline.stages import Stages

__all__ = [
    "SCHEDULES",
    "Cut",
    "Schedule",
    "Stage",
    "Stages",
    "absent_state",
    "build_schedule",
    "cut_model",
    "cut_of",
    "drop_others",
    "showing_others",
    "split_batch",
]
