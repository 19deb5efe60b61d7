"""Who may look at weights between two microbatches of one optimizer step."""

from typing import Any

from lightning.pytorch import Callback, LightningModule

__all__ = ["hooks_between_microbatches"]

_HOOKS = ("on_after_backward", "on_train_batch_end", "on_train_batch_start")
_KNOWN = ("lightning.", "lightning_ups.", "pytorch_lightning.")  # theirs look after an optimizer step, or not at all


def hooks_between_microbatches(module: LightningModule) -> list[str]:
    """Return the user's hooks that run between microbatches, by the names of their classes."""
    owners: list[Any] = [module, *(c for c in module.trainer.callbacks if not _known(c))]  # type: ignore[attr-defined]
    return [f"{type(owner).__name__}.{hook}" for owner in owners for hook in _HOOKS if _overrides(owner, hook)]


def _known(callback: Callback) -> bool:
    return type(callback).__module__.startswith(_KNOWN)


def _overrides(owner: Any, hook: str) -> bool:
    base = LightningModule if isinstance(owner, LightningModule) else Callback
    own = getattr(owner, hook)
    return getattr(own, "__func__", own) is not getattr(base, hook)
