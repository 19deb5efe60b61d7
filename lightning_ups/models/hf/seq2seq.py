"""Trains encoder-decoder models of Hugging Face's transformers."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_ups.models.hf.module import IGNORED, HFModule


class HFSeq2Seq(HFModule):
    """Trains a model with an encoder and a decoder, such as T5, or adapters for it, to write ``labels``.

    A batch is a dict as transformers' ``DataCollatorForSeq2Seq`` makes it: ``input_ids``, ``attention_mask``, and
    ``labels``, with -100 for padding. Validation logs ``val_loss``, the mean over tokens, and ``val_perplexity``.

    Args:
        **more: Those of `HFModule`.
    """

    auto_class = "AutoModelForSeq2SeqLM"
    task_type = "SEQ_2_SEQ_LM"
    logs_perplexity = True

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)

    @override
    def measure(self, batch: Mapping[str, Any]) -> dict[str, tuple[Tensor, Any]]:
        return {"loss": (self.model(**batch).loss, (batch["labels"] != IGNORED).sum())}
