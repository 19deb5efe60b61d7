"""Compare runs by their files: what differed, what effect it had, and whether that is more than noise."""

from lightning_ups.insight.compare.decision import (
    CANNOT_TELL,
    FAIL,
    PASS,
    Band,
    gate,
    interval,
    of_matched_steps,
    percent,
)
from lightning_ups.insight.compare.differences import (
    MEAN_STEP,
    STEP,
    Effect,
    Side,
    different_settings,
    effects,
    kind_of_times,
)
from lightning_ups.insight.compare.reading import RunLog, read_run

__all__ = [
    "CANNOT_TELL",
    "FAIL",
    "MEAN_STEP",
    "PASS",
    "STEP",
    "Band",
    "Effect",
    "RunLog",
    "Side",
    "different_settings",
    "effects",
    "gate",
    "interval",
    "kind_of_times",
    "of_matched_steps",
    "percent",
    "read_run",
]
