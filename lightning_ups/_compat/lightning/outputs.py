"""What Lightning's loop hands to ``on_train_batch_end``, as far as it tells what a step did."""

from typing import Any
from weakref import WeakKeyDictionary, ref

from lightning.pytorch import LightningModule, Trainer
from torch.optim import Optimizer

__all__ = ["was_skipped"]


def was_skipped(module: LightningModule, outputs: Any, *, began_at: int) -> bool:
    """Return whether ``training_step`` asked to skip the batch, by returning None.

    One that optimizes itself may return None always: that it did some work is told by an optimizer's step. Those of
    optimizers that it has asked for without Lightning's wrapper count in no global step: they are listened to from the
    end of the first batch that seems to have been skipped, which is then taken for one.

    Args:
        module: The module that trains.
        outputs: What the hook was given.
        began_at: The global step when the batch began.
    """
    if module.automatic_optimization:
        return not outputs or (isinstance(outputs, dict) and outputs.get("loss") is None)
    if outputs or module.trainer.global_step != began_at:
        return False
    stepped = [_has_stepped(optimizer, module.trainer) for optimizer in module.trainer.optimizers]  # each is asked
    return not any(stepped)


class _Heard:
    """Hears the steps of an optimizer while somebody asks for them at each batch."""

    def __init__(self, optimizer: Optimizer, trainer: Trainer) -> None:
        self.trainer = ref(trainer)
        self.asked_in = self.stepped_in = -1  # batches of this trainer
        self.handle = optimizer.register_step_post_hook(self._note)

    def _note(self, optimizer: Optimizer, *_: Any) -> None:
        trainer = self.trainer()
        self.stepped_in = -1 if trainer is None else trainer.fit_loop.total_batch_idx
        if trainer is None or self.asked_in < self.stepped_in - 1:
            self.handle.remove()
            _heard.pop(optimizer, None)


_heard: WeakKeyDictionary[Optimizer, _Heard] = WeakKeyDictionary()


def _has_stepped(optimizer: Optimizer, trainer: Trainer) -> bool:
    if not hasattr(optimizer, "_optimizer_step_post_hooks"):
        return False  # of a class of its own, which tells nobody
    heard = _heard.get(optimizer)
    if heard is not None and heard.trainer() is not trainer:
        heard.handle.remove()
    if heard is None or heard.trainer() is not trainer:
        heard = _heard[optimizer] = _Heard(optimizer, trainer)
    heard.asked_in = trainer.fit_loop.total_batch_idx
    return heard.stepped_in == heard.asked_in
