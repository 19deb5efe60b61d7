"""Compare runs by their files: what differed, what effect it had, and whether that is more than noise."""

from lightning_ups.insight.compare.decision import CANNOT_TELL, FAIL, PASS, Band, Decision, gate, percent
from lightning_ups.insight.compare.differences import MEAN_STEP, STEP, Effect, Side, different_settings, effects
from lightning_ups.insight.compare.intervals import Estimate
from lightning_ups.insight.compare.reading import RunLog, read_run

__all__ = [
    "CANNOT_TELL",
    "FAIL",
    "MEAN_STEP",
    "PASS",
    "STEP",
    "Band",
    "Decision",
    "Effect",
    "Estimate",
    "RunLog",
    "Side",
    "different_settings",
    "effects",
    "gate",
    "percent",
    "read_run",
]
