"""What torch knows of an optimizer and tells nobody by a public name."""

from torch.optim import Optimizer

__all__ = ["count_step", "has_own_step"]


def has_own_step(optimizer: Optimizer) -> bool:
    """Return whether someone gave ``optimizer`` another ``step``; a scheduler's, which only counts, does not count."""
    own = vars(optimizer).get("step")
    return own is not None and not hasattr(own, "_wrapped_by_lr_sched")


def count_step(optimizer: Optimizer) -> None:
    """Tell the schedulers of ``optimizer`` of a step that was made for it; they warn of one that was never made."""
    optimizer._opt_called = True  # type: ignore[attr-defined]
