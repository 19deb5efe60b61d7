"""One training step on fake tensors: nothing is computed, and nothing of the run changes."""

from lightning_ups.insight.dry_run.copies import FakeCopies
from lightning_ups.insight.dry_run.engine import DryRun, call_training_step, loss_in, plain_run
from lightning_ups.insight.dry_run.kinds import NotCopiedError

__all__ = ["DryRun", "FakeCopies", "NotCopiedError", "call_training_step", "loss_in", "plain_run"]
