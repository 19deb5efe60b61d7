"""Packed documents of folders of tokens, as training data for language models."""

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, get_args
from warnings import filterwarnings, warn

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from typing_extensions import override

from lightning_ups._compat.lightning.fit_loop import batches_taken
from lightning_ups.data.chat import ChatEncoder, load_chat_encoder
from lightning_ups.data.packing import Method, Packing, learned_rows, pack
from lightning_ups.data.token_folder import TokenFolder
from lightning_ups.data.workers import Workers, as_it_is, worker_options
from lightning_ups.kernels.attention import Documents
from lightning_ups.order.arguments import check_choice

_IGNORED = -100  # the target of padding, which torch's cross-entropy ignores
_ROWS, _EPOCH = 0, 1  # what a random order is for, so that two orders of one seed differ


class PackedBatch(NamedTuple):
    """A batch of rows, each of several documents.

    Args:
        tokens: Inputs [batch, seq], int64.
        targets: The next token of the same document for each input, [batch, seq], int64; -100 for padding, and in chats
            for all but answers.
        positions: The position of each input in its document, or in the piece of it that is in this row; int64.
        documents: The boundaries, for `lightning_ups.kernels.attention.attention`.
    """

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    documents: Documents


class PackedTokens(LightningDataModule):
    """Documents of memory-mapped token folders, packed into rows of ``seq_len`` predictions.

    A batch is a `PackedBatch`. Attention with its ``documents`` sees only tokens of the same document, so the loss is
    that of the documents one by one. `GPTModule` uses them.

    An epoch has each training row once or, with weights, as many rows of each folder as its weight says, until the
    first folder has no more. A later epoch continues with the next rows of the others. The order of rows depends on
    ``seed`` and the epoch, and not on the number of ranks and workers. Rows are divided among ranks without overlap;
    the last rows, fewer than a batch on each rank, are left out.

    Resuming within an epoch is exact with `FSDP2Strategy` or `ExactResume`. On another number of ranks, with any batch
    size, the epoch continues with the rows that no rank has trained on.

    Args:
        folders: A folder that ``python -m lightning_ups tokenize`` wrote, a list of folders, or folders with weights:
            ``{"web": 0.7, "code": 0.3}``.
        seq_len: Predictions in a row.
        batch_size: Rows in a batch on each device.
        packing: ``"best_fit"`` cuts only documents longer than a row; ``"greedy"`` concatenates them. See
            `lightning_ups.data.packing.pack`.
        val_fraction: The share of documents that is for validation, chosen by the hash of a document's text.
        num_workers: Processes that read batches, of each rank; ``"auto"``: by a measurement of some seconds.
        seed: For the order of documents and rows.

    Raises:
        ValueError: If an argument is out of range; in ``setup``, if the folders have different tokenizers, or too few
            documents.
        FileNotFoundError: In ``setup``, if a folder has no tokens.

    Example::

        Trainer(max_steps=500).fit(GPTModule(vocab_size=50257), PackedTokens("tokens", seq_len=256, batch_size=8))
    """

    def __init__(
        self,
        folders: str | list[str] | dict[str, float],
        *,
        seq_len: int,
        batch_size: int,
        packing: Method = "best_fit",
        val_fraction: float = 0.005,
        num_workers: Workers = 2,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_choice("packing", packing, get_args(Method), of="PackedTokens", why="It says how rows are filled.")
        weights = folders if isinstance(folders, Mapping) else None
        self.folders = [folders] if isinstance(folders, str | Path) else [*folders]
        if not self.folders or any(not weight > 0 for weight in (weights or {}).values()):
            raise ValueError(f"PackedTokens(folders={folders!r}) needs at least one folder, and weights above 0.")
        if seq_len < 1 or batch_size < 1 or not 0 <= val_fraction < 1:
            raise ValueError(
                f"PackedTokens(seq_len={seq_len}, batch_size={batch_size}, val_fraction={val_fraction}) needs at least"
                " one token and row, and a val_fraction from 0 to below 1."
            )
        self.weights = None if weights is None else [float(weight) for weight in weights.values()]
        self.seq_len, self.batch_size = int(seq_len), int(batch_size)
        self.packing: Method = packing
        self.val_fraction, self.seed = val_fraction, int(seed)
        self.num_workers: Workers = num_workers
        self.train_rows: PackedRows | None = None
        self.val_rows: PackedRows | None = None
        self._sources: list[TokenFolder] = []
        self._saved: dict[str, Any] | None = None

    @override
    def setup(self, stage: str) -> None:
        if self._sources:
            return
        sources = [TokenFolder(folder) for folder in self.folders]
        makers = {source.info["recipe"]["tokenizer"] for source in sources}
        if len(makers) > 1:
            raise ValueError(
                f"PackedTokens(folders={self.folders}) has folders of different tokenizers. The same number would be"
                " different text. Tokenize all sources with one tokenizer."
            )
        held_out = [source.held_out(self.val_fraction) for source in sources]
        train = [self._packed(s, ~out, number) for number, (s, out) in enumerate(zip(sources, held_out, strict=True))]
        val = [self._packed(source, out, None) for source, out in zip(sources, held_out, strict=True)]
        documents = sum(len(source.lengths) for source in sources)
        if not all(map(len, train)) or (self.val_fraction and not any(map(len, val))):
            which = "validation" if all(map(len, train)) else "training"
            raise ValueError(
                f"PackedTokens(val_fraction={self.val_fraction}) leaves {which} without a document of at least two"
                f" tokens. The folders have {documents} documents. Use more documents, or another val_fraction; with 0"
                " there is no validation."
            )
        self._sources = sources
        self.train_rows, self.val_rows = PackedRows(sources, train), PackedRows(sources, val)

    @property
    def vocab_size(self) -> int:
        """Tokens are below this number."""
        return self._sources[0].vocab_size if self._sources else TokenFolder(self.folders[0]).vocab_size

    @property
    def tokenizer(self) -> str:
        """A folder with the tokenizer."""
        return str(Path(self.folders[0]).absolute())

    @override
    def train_dataloader(self) -> DataLoader[PackedBatch]:
        assert self.train_rows is not None
        sampler = self._epoch_sampler()
        if (saved := self._saved) is not None:
            if saved["data"] != self._checksum:
                warn(
                    "PackedTokens: the checkpoint was saved with other documents, seq_len, packing or seed. A resumed"
                    " epoch trains on some rows again and leaves others out.",
                    stacklevel=2,
                )
            sampler.continue_after(saved["skipped"] + saved["rows"], epoch=saved["epoch"], batch_size=self.batch_size)
        if len(sampler) < self.batch_size:
            raise ValueError(
                f"PackedTokens(batch_size={self.batch_size}, seq_len={self.seq_len}) has {len(sampler)} training rows"
                " for each rank in an epoch, less than a batch. Use more documents, or smaller values."
            )
        self._sampler = sampler
        return self._loader(self.train_rows, sampler=sampler, drop_last=True)

    def _epoch_sampler(self) -> "EpochSampler":
        assert self.train_rows is not None
        num_ranks, rank = self._ranks
        return EpochSampler(self.train_rows, weights=self.weights, seed=self.seed, num_replicas=num_ranks, rank=rank)

    @override
    def val_dataloader(self) -> DataLoader[PackedBatch] | list[Any]:
        assert self.val_rows is not None
        return self._loader(self.val_rows) if len(self.val_rows) else []

    @override
    def state_dict(self) -> dict[str, Any]:
        if self.trainer is None or self.train_rows is None or not hasattr(self, "_sampler"):
            return {}
        epoch = self.trainer.current_epoch
        return {
            "epoch": epoch,
            "skipped": self._sampler.skipped(epoch),
            "rows": batches_taken(self.trainer) * self.batch_size * self._ranks[0],
            "data": self._checksum,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict or None

    @override
    def teardown(self, stage: str) -> None:
        self._saved = None  # another fit begins anew

    def encode(self, text: str) -> list[int]:
        """Return the tokens of ``text``, with what begins a document; of a chat, those of a user who says ``text``."""
        if self._chat is not None:
            return self._chat.prompt(text)
        return [*self._sources[0].info["begin"], *self._tokenizer.encode(text, add_special_tokens=False).ids]

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of ``tokens``."""
        return self._tokenizer.decode([*tokens], skip_special_tokens=False)

    @cached_property
    def _tokenizer(self) -> Any:
        return self._sources[0].tokenizer()

    @cached_property
    def _chat(self) -> ChatEncoder | None:
        chats = [source for source in self._sources if source.info.get("chat")]
        return load_chat_encoder(chats[0].path) if chats else None

    @cached_property
    def _checksum(self) -> int:
        assert self.train_rows is not None
        return zlib.crc32(repr((self.seed, self.weights, self.train_rows.checksum)).encode())

    @property
    def _ranks(self) -> tuple[int, int]:
        """The number of ranks that read different data, and the index of this one."""
        kwargs = getattr(self.trainer and self.trainer.strategy, "distributed_sampler_kwargs", None) or {}
        return kwargs.get("num_replicas", 1), kwargs.get("rank", 0)

    def _packed(self, source: TokenFolder, chosen: np.ndarray[Any, Any], number: int | None) -> Packing:
        """Pack the chosen documents, in a random order if ``number`` is given."""
        documents = np.flatnonzero(chosen)
        if number is not None:
            documents = np.random.default_rng((self.seed, number)).permutation(documents)
        packing = pack(source.starts[documents], source.lengths[documents], seq_len=self.seq_len, method=self.packing)
        return learned_rows(packing, source.tokens) if source.info.get("chat") else packing

    @cached_property
    def _workers(self) -> dict[str, Any]:
        def make(**workers: Any) -> DataLoader[PackedBatch]:
            assert self.train_rows is not None
            return self._loader(self.train_rows, sampler=self._epoch_sampler(), workers=workers)

        return worker_options(self.num_workers, make, self.trainer)

    def _loader(
        self, rows: "PackedRows", *, workers: dict[str, Any] | None = None, **options: Any
    ) -> DataLoader[PackedBatch]:
        workers = workers or self._workers
        filterwarnings("ignore", message=".*does not have many workers")  # a batch takes less than a millisecond
        on_gpu = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        return DataLoader(
            rows,
            batch_size=self.batch_size,
            persistent_workers=workers["num_workers"] > 0,
            pin_memory=on_gpu,
            collate_fn=as_it_is,
            **workers,
            **options,
        )


class PackedRows(Dataset[PackedBatch]):
    """Rows of several sources of tokens, of which a batch is gathered at once.

    Args:
        sources: Token folders, or others with an array ``tokens``.
        packings: The rows of each, numbered one after another.
    """

    def __init__(self, sources: Sequence[Any], packings: Sequence[Packing]) -> None:
        self._sources, self.sizes = sources, [len(packing) for packing in packings]
        self._packings, self._first = packings, np.cumsum([0, *self.sizes])

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getitem__(self, index: int) -> PackedBatch:
        return self.__getitems__([index])

    def __getitems__(self, indices: Sequence[int]) -> PackedBatch:
        """Return the rows as one batch. A DataLoader calls this in place of ``__getitem__``."""
        pieces = [self.pieces(index) for index in indices]
        seq_len, counts = self._packings[0].seq_len, [len(lengths) for _, _, lengths in pieces]
        starts, lengths = (np.concatenate(each) for each in ([p[1] for p in pieces], [p[2] for p in pieces]))
        source = np.repeat([number for number, _, _ in pieces], counts)
        row = np.repeat(np.arange(len(pieces)), counts)
        ends = np.cumsum(lengths)
        begins = ends - lengths  # of each piece in the concatenated pieces
        size = len(pieces) * seq_len
        used = np.bincount(row, lengths, minlength=len(pieces)).astype(np.int64)
        places = begins + (np.arange(len(pieces)) * seq_len - (np.cumsum(used) - used))[row]  # of each in the batch
        offset = np.arange(ends[-1])
        where = offset if ends[-1] == size else offset + np.repeat(places - begins, lengths)
        read = offset + np.repeat(starts - begins, lengths)

        tokens, targets = np.zeros(size, np.int64), np.full(size, _IGNORED, np.int64)
        positions = np.zeros(size, np.int64)
        positions[where] = offset - np.repeat(begins, lengths)
        numbers = np.unique(source)
        for number in numbers:
            here = slice(None) if len(numbers) == 1 else np.repeat(source == number, lengths)
            content = self._sources[number].tokens
            tokens[where[here]], targets[where[here]] = content[read[here]], content[read[here] + 1]
            if content.dtype.kind == "i":  # of a chat: a token that is not to be learned is its complement
                tokens ^= tokens >> 63
                targets[targets < 0] = _IGNORED
        # Padding is a document of its own.
        edges = np.union1d(np.concatenate((places, places + lengths)), np.arange(0, size + 1, seq_len))
        documents = Documents.from_cu_seqlens(torch.from_numpy(edges), batch=len(pieces), seq=seq_len)
        tokens, targets, positions = (
            torch.from_numpy(each).view(len(pieces), seq_len) for each in (tokens, targets, positions)
        )
        return PackedBatch(tokens, targets, positions, documents)

    def pieces(self, index: int) -> tuple[int, np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return the source of a row, and the starts and lengths of its pieces."""
        source = int(np.searchsorted(self._first, index, side="right")) - 1
        packing, row = self._packings[source], index - self._first[source]
        inside = slice(packing.rows[row], packing.rows[row + 1])
        return source, packing.starts[inside], packing.lengths[inside]

    @property
    def checksum(self) -> int:
        """A number that changes with the documents and with how they are packed."""
        value = 0
        for packing in self._packings:
            for array in (packing.starts, packing.lengths, packing.rows):
                value = zlib.crc32(np.ascontiguousarray(array).data, value)
        return value


class EpochSampler(DistributedSampler[Any]):
    """Gives each rank its rows of an epoch; all ranks together give the same order for any number of ranks.

    It is a DistributedSampler, so that Lightning keeps it and sets the epoch.

    Args:
        rows: The rows.
        weights: The share of each source in an epoch. None: every row once.
        seed: For the order.
        num_replicas: The number of ranks.
        rank: Which of them this is.

    Attributes:
        batches_done: In the epoch that was resumed, the batches of each rank that count as trained on; else None.
            `ExactResume` takes it in place of a number of its own if the number of ranks has changed.
    """

    def __init__(
        self, rows: PackedRows, *, weights: Sequence[float] | None, seed: int, num_replicas: int, rank: int
    ) -> None:
        super().__init__(rows, num_replicas=num_replicas, rank=rank, shuffle=True, seed=seed, drop_last=True)
        self._sizes = rows.sizes
        self._counts = rows.sizes if weights is None else _shares(rows.sizes, weights)
        self.batches_done: int | None = None
        self._resumed_epoch, self._skipped = -1, 0

    def __len__(self) -> int:
        return sum(self._counts) // self.num_replicas

    def __iter__(self) -> Iterator[int]:
        order, skipped = self.order(), self.skipped(self.epoch)
        # Below 0: a first batch of which a part was trained on is dropped as a whole, so what comes before is not read.
        order = np.concatenate((order[:-skipped], order)) if skipped < 0 else order[skipped:]
        end = len(order) // self.num_replicas * self.num_replicas
        return iter(order[self.rank : end : self.num_replicas].tolist())

    def continue_after(self, rows: int, *, epoch: int, batch_size: int) -> None:
        """Let the batches that are left of ``epoch`` begin behind its first ``rows``, with as many in all as always."""
        batch, total = batch_size * self.num_replicas, sum(self._counts)
        self.batches_done = total // batch - (total - rows) // batch
        self._resumed_epoch, self._skipped = epoch, rows - self.batches_done * batch

    def skipped(self, epoch: int) -> int:
        """Return how many rows come before the first batch of an epoch."""
        return self._skipped if epoch == self._resumed_epoch else 0

    def order(self) -> np.ndarray[Any, Any]:
        """Return the rows of this epoch for all ranks together."""
        first = np.cumsum([0, *self._sizes])
        order = np.concatenate([first[source] + self._rows(source) for source in range(len(self._sizes))])
        np.random.default_rng((self.seed, _EPOCH, self.epoch)).shuffle(order)
        return order

    def _rows(self, source: int) -> np.ndarray[Any, Any]:
        """Return the rows of one source: the next ones of its random order, which begins again at its end."""
        size, count = self._sizes[source], self._counts[source]
        order = np.random.default_rng((self.seed, _ROWS, source)).permutation(size)
        return order[(self.epoch * count + np.arange(count)) % size]


def _shares(sizes: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Return how many rows of each source are in an epoch."""
    shares = np.array(weights) / sum(weights)
    total = min(size / share for size, share in zip(sizes, shares, strict=True))
    return [min(size, max(round(float(total * share)), 1)) for size, share in zip(sizes, shares, strict=True)]
