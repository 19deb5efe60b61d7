"""Packed documents of streams, tokenized as they are read, as training data for language models."""

import zlib
from collections.abc import Iterable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_ups._compat.optional.tokenizers import Encoder, load_encoding
from lightning_ups.data.chat import ChatEncoder, load_chat_encoder
from lightning_ups.data.packed_tokens import PackedBatch, PackedRows
from lightning_ups.data.streaming import Recipe, StreamLoader, held_out_documents, open_source
from lightning_ups.data.streaming.lanes import pool
from lightning_ups.data.workers import Workers, as_it_is, worker_options


class StreamedTokens(LightningDataModule):
    """Documents of Hugging Face ``datasets`` or ``litdata``, tokenized and packed while training reads them.

    A batch is a `PackedBatch`, as of `PackedTokens`: documents are concatenated and cut into rows without padding, and
    attention with its ``documents`` sees only tokens of the same document.

    A stream has no end: after its last document it begins again, in another order. Train with ``max_steps``, or with
    ``limit_train_batches`` as the length of an epoch; the next epoch continues where the last one ended.

    Resuming is exact with `FSDP2Strategy` or `ExactResume`. On another number of ranks, the streams of all workers are
    divided anew, and no document is repeated or left out.

    Args:
        sources: A source, a list of sources that are read as one, or sources with their shares of the tokens:
            ``{"web/*.parquet": 0.7, "code/*.jsonl": 0.3}``. A source is a file, a folder, a pattern, an address
            (``s3://...``), a folder of ``save_to_disk`` or ``litdata.optimize``, a name on the Hugging Face Hub with or
            without ``:config``, a dataset, or a list of texts.
        tokenizer: ``bytes``, a ``tokenizer.json``, a folder with one, or a name on the Hub.
        seq_len: Predictions in a row.
        batch_size: Rows in a batch on each device.
        weights: The shares of a list of sources, which are then not read as one.
        field: The field with the text, or with the messages of a chat. None: ``text`` or ``messages``.
        chat: Documents are conversations, and only answers are learned. True, for the tokenizer's chat template, or the
            file of one.
        shuffle: Documents that each worker reads at a time and shuffles. 0: the order of the source.
        val_fraction: The share of documents that is for validation, chosen by the hash of a document's text: the same
            ones as in `PackedTokens`.
        val_rows: Rows of validation on all devices together, from the beginning of the sources.
        num_workers: Processes that read and tokenize, of each rank; ``"auto"``: by a measurement of some seconds.
        bos: The token that begins a document. None: what the tokenizer itself adds.
        eos: The token that ends a document. None: the tokenizer's own.
        seed: For the order of documents.

    Raises:
        ValueError: If an argument is out of range, or training would not end.
        FileNotFoundError: In ``setup``, if a source or the tokenizer is missing.
        ImportError: In ``setup``, if the package that reads a source is missing.

    Example::

        data = StreamedTokens("data/*.jsonl", tokenizer="bytes", seq_len=256, batch_size=8)
        Trainer(max_steps=500).fit(GPTModule(vocab_size=257), data)
    """

    def __init__(
        self,
        sources: str | list[Any] | dict[str, float],
        *,
        tokenizer: str,
        seq_len: int,
        batch_size: int,
        weights: list[float] | None = None,
        field: str | None = None,
        chat: bool | str = False,
        shuffle: int = 1000,
        val_fraction: float = 0.005,
        val_rows: int = 256,
        num_workers: Workers = 2,
        bos: str | None = None,
        eos: str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if isinstance(sources, Mapping):
            sources, weights = [*sources], [*sources.values()]
        several = [sources] if isinstance(sources, str | Path) else [*sources]
        self.sources = [several] if weights is None else [[source] for source in several]
        weights = [1.0] if weights is None else weights
        if not several or len(weights) != len(self.sources) or any(not weight > 0 for weight in weights):
            raise ValueError(
                f"StreamedTokens(weights={weights}) needs at least one source, and a weight above 0 for each."
            )
        if min(seq_len, batch_size) < 1 or shuffle < 0 or not 0 <= val_fraction < 1 or val_rows < 1:
            raise ValueError(
                f"StreamedTokens(seq_len={seq_len}, batch_size={batch_size}, shuffle={shuffle},"
                f" val_fraction={val_fraction}, val_rows={val_rows}) needs at least one token and row, no negative"
                " number, and a val_fraction from 0 to below 1."
            )
        self.weights = [float(weight) / sum(weights) for weight in weights]
        self.tokenizer, self.bos, self.eos, self.chat = tokenizer, bos, eos, chat
        self.field = field or ("messages" if chat else "text")
        self.seq_len, self.batch_size, self.shuffle, self.seed = int(seq_len), int(batch_size), int(shuffle), int(seed)
        self.val_fraction, self.val_rows = val_fraction, int(val_rows)
        self.num_workers: Workers = num_workers
        self._recipe: Recipe | None = None

    @override
    def setup(self, stage: str) -> None:
        if self._recipe is not None:
            return
        self._encoding = load_encoding(self.tokenizer, bos=self.bos, eos=self.eos)
        self._recipe = Recipe(
            sources=[[open_source(each) for each in several] for several in self.sources],
            weights=self.weights,
            field=self.field,
            encoder=load_chat_encoder(self.tokenizer, template=self.chat) if self.chat else Encoder(self._encoding),
            seq_len=self.seq_len,
            batch_size=self.batch_size,
            block=self.shuffle,
            held_out=self.val_fraction,
            seed=self.seed,
        )

    @property
    def vocab_size(self) -> int:
        """Tokens are below this number."""
        if self._recipe is None:
            return load_encoding(self.tokenizer, bos=self.bos, eos=self.eos).vocab_size
        return self._encoding.vocab_size

    @override
    def train_dataloader(self) -> StreamLoader:
        assert self._recipe is not None
        trainer = self.trainer
        if (
            trainer is not None
            and (trainer.max_epochs or -1) > 0
            and trainer.max_steps == -1
            and trainer.limit_train_batches == 1.0
        ):
            raise ValueError(
                f"StreamedTokens has no end, so the first of {trainer.max_epochs} epochs would last forever. Use"
                " Trainer(max_steps=...), or limit_train_batches=... as the length of an epoch."
            )
        kwargs = getattr(trainer and trainer.strategy, "distributed_sampler_kwargs", None) or {}
        make = partial(
            StreamLoader,
            self._recipe,
            rank=kwargs.get("rank", 0),
            num_ranks=kwargs.get("num_replicas", 1),
            checksum=self._checksum,
            pin_memory=self._on_gpu,
        )
        return make(**worker_options(self.num_workers, make, trainer))

    @override
    def val_dataloader(self) -> DataLoader[PackedBatch] | list[Any]:
        if not self.val_fraction:
            return []
        return DataLoader(self._val_rows, batch_size=self.batch_size, collate_fn=as_it_is, pin_memory=self._on_gpu)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of ``text``, with what begins a document; of a chat, those of a user who says ``text``."""
        assert self._recipe is not None
        encoder = self._recipe.encoder
        if isinstance(encoder, ChatEncoder):
            return encoder.prompt(text)
        tokenizer = encoder.tokenizer
        return [*self._encoding.begin, *tokenizer.encode(text, add_special_tokens=False).ids]

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of ``tokens``."""
        assert self._recipe is not None
        return self._recipe.encoder.tokenizer.decode([*tokens], skip_special_tokens=False)

    @cached_property
    def _val_rows(self) -> PackedRows:
        """The first held-out documents of each source, in the shares of training."""
        assert self._recipe is not None
        recipe = self._recipe
        documents = []
        for datasets, weight in zip(recipe.sources, recipe.weights, strict=True):
            left = self.val_rows * self.seq_len * weight
            for document in held_out_documents(pool(datasets, lanes=1, field=self.field), self.val_fraction):
                documents.append(recipe.encode(document))
                left -= len(documents[-1]) - 1
                if left <= 0:
                    break
        if not any(len(document) > 1 for document in documents):
            raise ValueError(
                f"StreamedTokens(val_fraction={self.val_fraction}) finds no document for validation. Use a larger"
                " val_fraction, or 0 for no validation."
            )
        return recipe.rows(documents)

    @property
    def _on_gpu(self) -> bool:
        return self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"

    @property
    def _checksum(self) -> int:
        assert self._recipe is not None
        names = [[each if isinstance(each, str) else type(each).__name__ for each in some] for some in self.sources]
        settings = (names, self.field, self.chat, self._encoding.digest, self.val_fraction, self.shuffle, self.seed)
        return zlib.crc32(repr(settings).encode())
