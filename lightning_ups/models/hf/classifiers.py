"""Train classifiers of texts and images of Hugging Face's transformers."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_ups.models.hf.module import HFModule


class _Classifier(HFModule):
    metrics = ("loss", "accuracy")

    def __init__(self, *, num_labels: int = 2, **more: Any) -> None:
        super().__init__(**more)
        self.num_labels = num_labels

    @override
    def config_options(self) -> dict[str, Any]:
        # A head for other labels, as of ImageNet, is replaced by a new one.
        return {"num_labels": self.num_labels} | ({} if self.pretrained is None else {"ignore_mismatched_sizes": True})

    @override
    def on_fit_start(self) -> None:
        super().on_fit_start()
        data: Any = getattr(self.trainer, "datamodule", None)
        if getattr(data, "num_labels", self.num_labels) > self.num_labels:
            raise ValueError(
                f"{type(self).__name__}(num_labels={self.num_labels}) is less than the {data.num_labels} labels of"
                f" {type(data).__name__}. Set num_labels={data.num_labels}."
            )

    @override
    def measure(self, batch: Mapping[str, Any]) -> dict[str, tuple[Tensor, Any]]:
        output, labels = self.model(**batch), batch["labels"]
        right = output.logits.argmax(-1) == labels if labels.dim() == 1 else (output.logits > 0) == (labels > 0.5)
        return {"loss": (output.loss, len(labels)), "accuracy": (right.float().mean(), len(labels))}


class HFSequenceClassifier(_Classifier):
    """Trains a classifier of texts, such as BERT, or adapters for it.

    A batch is a dict as transformers' collators and `LabeledText` make it: ``input_ids``, ``attention_mask``, and
    ``labels``, which are class numbers, or [batch, num_labels] floats if a text may be of several classes. Validation
    logs ``val_loss`` and ``val_accuracy``.

    Args:
        num_labels: The number of classes.
        **more: Those of `HFModule`.

    Example::

        data = LabeledText("reviews.jsonl", tokenizer="google-bert/bert-base-uncased", batch_size=32)
        Trainer(max_epochs=3).fit(HFSequenceClassifier(pretrained="google-bert/bert-base-uncased"), data)
    """

    auto_class = "AutoModelForSequenceClassification"
    task_type = "SEQ_CLS"


class HFImageClassifier(_Classifier):
    """Trains a classifier of images, such as ViT, or adapters for it.

    A batch is a dict with ``pixel_values`` [batch, channels, height, width] and ``labels``, as of
    `HFSequenceClassifier`. Validation logs ``val_loss`` and ``val_accuracy``.

    Args:
        num_labels: The number of classes.
        **more: Those of `HFModule`. ``lora`` needs ``target_modules``, and ``modules_to_save: [classifier]`` to
            train the head.
    """

    auto_class = "AutoModelForImageClassification"
    task_type = None
