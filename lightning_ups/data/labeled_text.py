"""Texts with labels, as training data for classifiers."""

import csv
import glob
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_ups._compat.optional.packages import require
from lightning_ups._compat.optional.tokenizers import content_hash

_MULTIPLE = 8  # of the length of a batch, for the GPU


class LabeledText(LightningDataModule):
    """Texts of JSON Lines or CSV files with a label each, tokenized in ``setup`` and kept in memory.

    A batch is a dict as transformers' collators make it, padded to its longest text. `HFSequenceClassifier` trains on
    it.

    Args:
        files: A file or a pattern, or a list of them.
        tokenizer: A folder with a tokenizer, or its name on the Hub.
        batch_size: Texts in a batch on each device.
        max_length: Tokens of a text, at most; the rest is cut off.
        text: The field with the text.
        pair: The field with a second text, if there is one.
        label: The field with the label: a number from 0, or a name. Names are numbered in alphabetical order. A list of
            numbers is for texts that may be of several classes.
        val_fraction: The share of texts that is for validation, chosen by the hash of a text.
        num_workers: Processes that make batches, of each rank.

    Attributes:
        names: In ``setup``, the name of each label.

    Raises:
        FileNotFoundError: In ``setup``, if there is no such file.
        ValueError: In ``setup``, if a field is missing, or no text is for training.

    Example::

        LabeledText("reviews.jsonl", tokenizer="google-bert/bert-base-uncased", batch_size=32)
    """

    def __init__(
        self,
        files: str | list[str],
        *,
        tokenizer: str,
        batch_size: int,
        max_length: int = 512,
        text: str = "text",
        pair: str | None = None,
        label: str = "label",
        val_fraction: float = 0.1,
        num_workers: int = 2,
    ) -> None:
        super().__init__()
        self.files = [files] if isinstance(files, str) else [*files]
        self.tokenizer, self.batch_size, self.max_length = tokenizer, batch_size, max_length
        self.text, self.pair, self.label = text, pair, label
        self.val_fraction, self.num_workers = val_fraction, num_workers
        self.names: list[str] = []
        self._train: list[Any] = []
        self._val: list[Any] = []

    @override
    def setup(self, stage: str) -> None:
        if self._train:
            return
        transformers = require("transformers", requirement="transformers>=5", extra="hf", feature="LabeledText")
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.tokenizer)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        self._collate = transformers.DataCollatorWithPadding(tokenizer, pad_to_multiple_of=_MULTIPLE)
        records = [*self._records()]
        texts = [str(record[self.text]) for record in records]
        pairs = None if self.pair is None else [str(record[self.pair]) for record in records]
        labels = self._numbered([record[self.label] for record in records])
        encoded = tokenizer(texts, pairs, truncation=True, max_length=self.max_length) if texts else {}
        digests = (int.from_bytes(content_hash(text.encode(errors="replace")), "little") for text in texts)
        for index, digest in enumerate(digests):
            held_out = digest < np.float64(self.val_fraction) * 2.0**64
            example = {name: values[index] for name, values in encoded.items()} | {"labels": labels[index]}
            (self._val if held_out else self._train).append(example)
        if len(self._train) < self.batch_size or (self.val_fraction and not self._val):
            raise ValueError(
                f"LabeledText(batch_size={self.batch_size}, val_fraction={self.val_fraction}) has {len(self._train)}"
                f" texts for training and {len(self._val)} for validation. Use more texts, or other values."
            )

    @property
    def num_labels(self) -> int:
        """The number of labels in the files."""
        return len(self.names)

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(self._train, shuffle=True, drop_last=True)

    @override
    def val_dataloader(self) -> DataLoader[Any] | list[Any]:
        return self._loader(self._val) if self._val else []

    def _loader(self, examples: list[Any], **options: Any) -> DataLoader[Any]:
        on_gpu = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        return DataLoader(
            examples,  # type: ignore[arg-type]
            batch_size=self.batch_size,
            collate_fn=self._collate,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=on_gpu,
            **options,
        )

    def _records(self) -> Iterator[dict[str, Any]]:
        wanted = [name for name in (self.text, self.pair, self.label) if name is not None]
        for pattern in self.files:
            paths = sorted(glob.glob(pattern, recursive=True))
            if not paths:
                raise FileNotFoundError(f"LabeledText: {pattern} does not exist (looked up from {Path.cwd()}).")
            for path in paths:
                with open(path, encoding="utf-8", newline="") as file:
                    lines = (
                        csv.DictReader(file) if path.endswith(".csv") else (json.loads(x) for x in file if x.strip())
                    )
                    for record in lines:
                        if missing := [name for name in wanted if record.get(name) is None]:
                            raise ValueError(
                                f"LabeledText: {path} has a record without {missing[0]!r}. Its fields:"
                                f" {', '.join(record)}."
                            )
                        yield record

    def _numbered(self, labels: list[Any]) -> list[Any]:
        if labels and isinstance(labels[0], list):
            self.names = [str(number) for number in range(len(labels[0]))]
            return [[float(each) for each in some] for some in labels]
        if all(isinstance(each, int) or str(each).isdecimal() for each in labels):
            self.names = [str(number) for number in range(max(map(int, labels), default=-1) + 1)]
            return [int(each) for each in labels]
        self.names = sorted({str(each) for each in labels})
        numbers = {name: number for number, name in enumerate(self.names)}
        return [numbers[str(each)] for each in labels]
