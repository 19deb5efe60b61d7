"""Pack documents into rows of equal length without padding.

A document of n tokens has n - 1 predictions: of each token but the first, from the tokens before it. A row holds
``seq_len`` predictions. A document that does not fit is cut; its later pieces are documents of their own for
attention and positions. The token at a cut is the last target of one piece and the first input of the next, so each
prediction is in exactly one row.

All functions work on arrays of documents, not on tokens.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Method = Literal["best_fit", "greedy"]
Array = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class Packing:
    """Which pieces of documents are in which row.

    Args:
        starts: The position of each piece's first input, in the order of rows.
        lengths: The predictions of each piece.
        rows: [rows + 1], the first piece of each row, and the end of the last.
        seq_len: Predictions in a full row.
    """

    starts: Array
    lengths: Array
    rows: Array
    seq_len: int

    def __len__(self) -> int:
        return len(self.rows) - 1

    @property
    def efficiency(self) -> float:
        """The share of positions that are not padding."""
        return float(self.lengths.sum() / max(len(self) * self.seq_len, 1))


def pack(starts: Array, lengths: Array, *, seq_len: int, method: Method) -> Packing:
    """Pack documents, given by the position of their first token and their number of tokens, in this order.

    Args:
        starts: Position of each document's first token.
        lengths: Tokens of each document. One of a single token has no prediction and is left out.
        seq_len: Predictions in a row.
        method: ``"greedy"`` concatenates all documents and cuts the result into rows: only the last row may have
            padding. ``"best_fit"`` cuts only documents that are longer than a row, and puts each into the row where the
            least room is left, longest first; the room that remains at the end of a row is padding.
    """
    several = lengths > 1
    starts, predictions = starts[several], lengths[several] - 1
    if not len(starts):
        empty = np.empty(0, np.int64)
        return Packing(empty, empty, np.zeros(1, np.int64), seq_len)
    return (_greedy if method == "greedy" else _best_fit)(starts, predictions, seq_len)


def num_cut(packing: Packing, lengths: Array) -> int:
    """Return how many pieces there are beyond one for each document of two tokens or more."""
    return len(packing.starts) - int((lengths > 1).sum())


def learned_rows(packing: Packing, tokens: Array) -> Packing:
    """Return ``packing`` without rows in which each target is negative, which is not to be learned."""
    if not len(packing):
        return packing
    order = np.argsort(packing.starts)
    first = packing.starts[order] + 1
    edges = np.stack((first, first + packing.lengths[order]), 1).ravel()
    learned = np.empty(len(order), bool)
    learned[order] = np.logical_or.reduceat(np.append(tokens >= 0, False), edges)[::2]
    kept = np.logical_or.reduceat(learned, packing.rows[:-1])
    pieces, sizes = np.repeat(kept, np.diff(packing.rows)), np.diff(packing.rows)[kept]
    rows = np.concatenate(([0], np.cumsum(sizes)))
    return Packing(packing.starts[pieces], packing.lengths[pieces], rows, packing.seq_len)


def _greedy(starts: Array, lengths: Array, seq_len: int) -> Packing:
    ends = np.cumsum(lengths)
    total = int(ends[-1])
    cuts = np.union1d(np.arange(0, total, seq_len), np.concatenate(([0], ends)))
    document = np.searchsorted(ends, cuts[:-1], side="right")
    begins = starts[document] + cuts[:-1] - (ends - lengths)[document]
    rows = np.searchsorted(cuts[:-1], np.arange(0, total + seq_len, seq_len))
    return Packing(begins, np.diff(cuts), rows, seq_len)


def _best_fit(starts: Array, lengths: Array, seq_len: int) -> Packing:
    starts, lengths = _cut(starts, lengths, seq_len)
    order = np.argsort(-lengths, kind="stable")  # equal lengths keep the order in which they were given
    starts, lengths = starts[order], lengths[order]
    row = _rows_by_best_fit(lengths, seq_len)
    order = np.argsort(row, kind="stable")
    rows = np.concatenate(([0], np.cumsum(np.bincount(row))))
    return Packing(starts[order], lengths[order], rows, seq_len)


def _cut(starts: Array, lengths: Array, seq_len: int) -> tuple[Array, Array]:
    """Cut documents that are longer than a row into full rows and a rest."""
    parts = -(-lengths // seq_len)
    number = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)  # of each piece in its document
    return (
        np.repeat(starts, parts) + number * seq_len,
        np.minimum(np.repeat(lengths, parts) - number * seq_len, seq_len),
    )


def _rows_by_best_fit(lengths: Array, seq_len: int) -> Array:
    """Return the row of each piece; ``lengths`` decrease.

    Pieces of one length are placed together, into all rows that have one amount of room left: the result is that of
    placing one after another, and the number of steps depends on ``seq_len`` and not on the number of pieces.
    """
    row = np.empty(len(lengths), np.int64)
    room: dict[int, Array] = {}  # rows by the room that is left in them
    rooms: list[int] = []  # its keys, sorted
    num_rows, placed = 0, 0
    changes = np.flatnonzero(np.diff(lengths)) + 1
    for end in (*changes.tolist(), len(lengths)):
        length = int(lengths[placed])
        while placed < end:
            left = end - placed
            position = bisect_left(rooms, length)
            size = rooms[position] if position < len(rooms) else seq_len
            each = size // length  # the rest of a row that got a piece is where the next one fits best
            wanted = -(-left // each)
            if position < len(rooms):
                rows = room[size][:wanted]
                if len(rows) < len(room[size]):
                    room[size] = room[size][wanted:]
                else:
                    del room[size], rooms[position]
            else:
                rows = np.arange(num_rows, num_rows + wanted)
                num_rows += wanted
            count = min(left, len(rows) * each)
            row[placed : placed + count] = np.repeat(rows, each)[:count]
            placed += count
            full, rest = divmod(count, each)
            _put_back(room, rooms, size - each * length, rows[:full])
            if rest:
                _put_back(room, rooms, size - rest * length, rows[full:])
    return row


def _put_back(room: dict[int, Array], rooms: list[int], size: int, rows: Array) -> None:
    if not size or not len(rows):
        return
    if size in room:
        room[size] = np.concatenate((room[size], rows))
    else:
        room[size] = rows
        insort(rooms, size)
