"""The FLOPs of one training step, counted in a dry run."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_ups._compat.torch.flop_counter import run_backward
from lightning_ups.insight.dry_run import DryRun, NotCopiedError, call_training_step, loss_in, plain_run
from lightning_ups.insight.throughput.flops import count_flops

__all__ = ["StepFlops", "step_flops"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFlops:
    """Floating-point operations of one forward and backward pass.

    Args:
        model: Required by the model.
        hardware: Including what activation checkpointing recomputes.
        low_precision: The part of ``model`` in layers converted to float8.
    """

    model: int
    hardware: int
    low_precision: int = 0


def step_flops(module: nn.Module, batch: Any, *, step: Callable[[Any, Any], Any] = call_training_step) -> StepFlops:
    """Count the FLOPs of one training step and its backward pass, without running it.

    Args:
        module: Not changed. Sharded, compiled and converted modules count as the plain module.
        batch: Its shapes and dtypes matter, and the values of small integer tensors, such as lengths and masks.
        step: Called with copies of both. Returns a loss, a mapping with one, or None.

    Raises:
        NotCopiedError: If the step uses an object that cannot be copied.
        Exception: Whatever the step raises on fake tensors.
    """
    try:
        return _counted(module, batch, step, knows_values=True)
    except NotCopiedError:
        raise
    except Exception:  # noqa: BLE001  (a branch taken because of known values may need unknown ones)
        return _counted(module, batch, step, knows_values=False)


def _counted(module: nn.Module, batch: Any, step: Callable[[Any, Any], Any], *, knows_values: bool) -> StepFlops:
    with plain_run(module, batch, knows_values=knows_values) as dry_run:
        counted = count_flops(lambda: _forward_backward(step, dry_run))
        return StepFlops(
            model=counted.total - counted.recomputed,
            hardware=counted.total,
            low_precision=dry_run.float8_flops,
        )


def _forward_backward(step: Callable[[Any, Any], Any], dry_run: DryRun) -> None:
    loss = loss_in(step(dry_run.module, dry_run.batch))
    if loss is not None and loss.requires_grad:
        run_backward(loss)
