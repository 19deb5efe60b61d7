import sysconfig
import time
from pathlib import Path

import numpy as np
import pytest

from lightning_ups.data.packing import num_cut, pack

METHODS = ("greedy", "best_fit")


def documents(lengths):
    lengths = np.array(lengths)
    return np.cumsum(lengths) - lengths, lengths


def predictions(starts, lengths):
    """Return the position of each prediction's input."""
    return np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)] or [np.empty(0, int)])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("seq_len", [1, 7, 64, 1000])
def test_each_prediction_is_in_one_row_and_rows_hold_what_they_can(method, seq_len):
    starts, lengths = documents(np.random.default_rng(seq_len).integers(1, 300, 500))
    packing = pack(starts, lengths, seq_len=seq_len, method=method)
    found = predictions(packing.starts, packing.lengths)
    assert sorted(found.tolist()) == predictions(starts, lengths - 1).tolist()
    used = np.add.reduceat(packing.lengths, packing.rows[:-1])
    assert packing.rows[-1] == len(packing.lengths)
    assert used.max() <= seq_len
    if method == "greedy":
        assert (used[:-1] == seq_len).all()
        assert np.array_equal(found, np.sort(found)), "in the order that was given"


def test_best_fit_is_that_of_one_piece_after_another():
    random = np.random.default_rng(0)
    for _ in range(30):
        seq_len = int(random.integers(5, 40))
        starts, lengths = documents(random.integers(2, 60, 80))
        packing = pack(starts, lengths, seq_len=seq_len, method="best_fit")
        rooms = []
        pieces = [min(seq_len, n - at) for n in (lengths - 1).tolist() for at in range(0, n, seq_len)]
        for piece in sorted(pieces, reverse=True):
            fitting = [number for number, room in enumerate(rooms) if room >= piece]
            best = min(fitting, key=lambda number: rooms[number], default=None)
            if best is None:
                rooms.append(seq_len - piece)
            else:
                rooms[best] -= piece
        used = np.add.reduceat(packing.lengths, packing.rows[:-1])
        assert sorted((seq_len - used).tolist()) == sorted(rooms)


def test_best_fit_cuts_only_documents_longer_than_a_row():
    starts, lengths = documents([5, 9, 33, 8])
    assert num_cut(pack(starts, lengths, seq_len=16, method="best_fit"), lengths) == 1


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("lengths", [[], [1, 1]])
def test_documents_without_a_prediction_give_no_row(method, lengths):
    assert len(pack(*documents(np.array(lengths, int)), seq_len=8, method=method)) == 0


def test_rows_of_the_standard_library_are_nearly_full():
    sizes = [path.stat().st_size for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))]
    starts, lengths = documents([size + 1 for size in sizes if size])
    padded = np.minimum(lengths - 1, 4096).mean() / 4096
    assert padded < 0.95
    assert pack(starts, lengths, seq_len=4096, method="greedy").efficiency > 0.999
    assert pack(starts, lengths, seq_len=4096, method="best_fit").efficiency > 0.99


def test_many_documents_are_packed_in_a_moment():
    starts, lengths = documents(np.random.default_rng(0).integers(2, 3000, 300_000))
    start = time.process_time()
    pack(starts, lengths, seq_len=2048, method="best_fit")
    assert time.process_time() - start < 5, "no step for each document"
