"""Compares the validation loss with the entropy of single tokens."""

import math

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

__all__ = ["UnigramBaseline"]


class UnigramBaseline(Callback):
    """Print the validation loss, the unigram entropy of the training tokens, and their ratio at the end of fit.

    The unigram entropy is the loss of a model that knows only how frequent each token is. A ratio of one means that the
    model learned nothing more. The datamodule must provide it as ``unigram_entropy``, in nats per token.

    Args:
        metric: The name under which the validation loss is logged, in nats per token.

    Raises:
        TypeError: When fitting starts, if the datamodule has no unigram entropy.
    """

    def __init__(self, *, metric: str = "val_loss") -> None:
        self.metric = metric

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        data = trainer.datamodule  # type: ignore[attr-defined]
        if not hasattr(data, "unigram_entropy"):
            where = "a run without a datamodule" if data is None else type(data).__name__
            raise TypeError(
                f"UnigramBaseline finds no unigram_entropy in {where}."
                " It compares the validation loss with the entropy of the datamodule's training tokens."
                " Give the datamodule that attribute, or take UnigramBaseline out of the callbacks."
            )

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        entropy = trainer.datamodule.unigram_entropy  # type: ignore[attr-defined]
        loss = trainer.callback_metrics.get(self.metric)
        if not trainer.is_global_zero:
            return
        if loss is None:
            trainer.print(f"\nNo {self.metric} was logged; the unigram entropy is {_both(entropy)}.")
            return
        trainer.print(
            f"\nValidation loss  {_both(loss.item())}"
            f"\nUnigram entropy  {_both(entropy)}"
            f"\nRatio            {loss.item() / entropy:.3f}"
        )


def _both(nats: float) -> str:
    return f"{nats:.3f} nats a token ({nats / math.log(2):.3f} bits)"
