"""A lane: an endless stream of packed batches, with the position behind each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from lightning_ups._compat.optional.tokenizers import Encoder
from lightning_ups.data.chat import ChatEncoder
from lightning_ups.data.packed_tokens import PackedBatch, PackedRows
from lightning_ups.data.packing import pack
from lightning_ups.data.streaming.documents import Place, Reader, shards_of


@dataclass
class Recipe:
    """How documents become batches, the same in all lanes.

    Args:
        sources: For each, what `open_source` returned: several datasets that are read as one.
        weights: The share of each source in the predictions.
        field: The field with the text.
        encoder: The tokenizer, or that of a chat.
        seq_len: Predictions in a row.
        batch_size: Rows in a batch.
        block: Documents that are shuffled together. 0: do not shuffle.
        held_out: The share of documents that is left out, by hash.
        seed: For the order.
    """

    sources: list[list[Any]]
    weights: list[float]
    field: str
    encoder: Encoder | ChatEncoder
    seq_len: int
    batch_size: int
    block: int
    held_out: float
    seed: int

    def batches(self, lane: int, lanes: int, state: dict[str, Any] | None) -> Iterator[tuple[PackedBatch, Any]]:
        """Yield the batches of a lane behind ``state``, each with the state behind it.

        The next document comes from the source that lacks most of its share. Documents are concatenated and cut
        into rows. A state has the place before the document that the last row cuts, and how much of it was used.
        """
        readers = [
            Reader(
                pool(datasets, lanes=lanes, field=self.field),
                lane=lane,
                lanes=lanes,
                block=self.block,
                seed=(self.seed, number),
                held_out=self.held_out,
            )
            for number, datasets in enumerate(self.sources)
        ]
        before = state or {"places": [Place()] * len(readers), "done": [0] * len(readers), "used": 0}
        places, done, used = [Place(*each) for each in before["places"]], [*before["done"]], before["used"]
        streams = [reader.documents(place) for reader, place in zip(readers, places, strict=True)]
        need = self.seq_len * self.batch_size
        documents: list[np.ndarray[Any, Any]] = []
        have = -used  # predictions that no batch has had
        while True:
            while have < need:
                before = {"places": [*places], "done": [*done]}
                source = min(range(len(readers)), key=lambda each: done[each] / self.weights[each])
                places[source], document = next(streams[source])
                documents.append(self.encode(document))
                predictions = max(len(documents[-1]) - 1, 0)
                done[source] += predictions or 1  # otherwise a source without any would be chosen forever
                have += predictions
            batch = self.rows(documents, used).__getitems__(range(self.batch_size))
            have -= need
            documents = documents[-1:] if have else []
            used = len(documents[0]) - 1 - have if have else 0
            if not have:
                before = {"places": [*places], "done": [*done]}
            if (batch.targets >= 0).any():  # a piece of a chat may be without an answer
                yield batch, {**before, "used": used}

    def encode(self, document: Any) -> np.ndarray[Any, Any]:
        """Return the tokens of a document, which may be text or tokens already."""
        is_chat = isinstance(self.encoder, ChatEncoder)
        return self.encoder.one(document) if is_chat or isinstance(document, str) else np.asarray(document)

    def rows(self, documents: Sequence[np.ndarray[Any, Any]], used: int = 0) -> PackedRows:
        """Pack documents, without the first ``used`` predictions."""
        lengths = np.array([len(each) for each in documents], np.int64)
        starts = np.cumsum(lengths) - lengths
        starts[0] += used
        lengths[0] -= used
        packing = pack(starts, lengths, seq_len=self.seq_len, method="greedy")
        return PackedRows([SimpleNamespace(tokens=np.concatenate(documents))], [packing])


def pool(datasets: Sequence[Any], *, lanes: int, field: str) -> list[tuple[Any, int]]:
    """Return the shards of several datasets that are read as one."""
    sources = [shards_of(dataset, lanes=lanes, field=field) for dataset in datasets]
    return [(source, shard) for source in sources for shard in range(source.num_shards)]
