"""One training step on fake tensors, and what it tells of memory and time."""

from lightning_ups.insight.dry_run.plan import MOST, Planner, Variant
from lightning_ups.insight.dry_run.rehearsal import Uncountable

__all__ = ["MOST", "Planner", "Uncountable", "Variant"]
