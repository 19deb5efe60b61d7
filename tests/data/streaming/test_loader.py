import json
from itertools import islice

import pytest

from lightning_ups._compat.lightning.loaders import read_ahead, why_not
from lightning_ups.data.streaming.loader import StreamLoader
from tests.data.streaming.test_lanes import recipe


def loader(*, rank=0, num_ranks=1, num_workers=0, checksum=0, count=900, **options):
    documents = [[*range(start, start + 9)] for start in range(0, 9 * count, 9)]  # each token is found once
    made = recipe(documents, **options)
    return StreamLoader(made, rank=rank, num_ranks=num_ranks, num_workers=num_workers, checksum=checksum)


def given(loader, count):
    return [batch.tokens.flatten().tolist() for batch in islice(iter(loader), count)]


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_no_prediction_is_lost_or_repeated_over_ranks_and_workers(num_ranks, num_workers):
    each = 400 // num_ranks // max(num_workers, 1) * max(num_workers, 1)  # 16 of 7200 predictions in each
    loaders = [loader(rank=rank, num_ranks=num_ranks, num_workers=num_workers) for rank in range(num_ranks)]
    found = [token for made in loaders for batch in given(made, each) for token in batch]
    assert len(found) == len({*found}) == 16 * each * num_ranks


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("done", [1, 4, 7])
def test_a_loader_continues_behind_the_last_batch(done, num_workers):
    """Workers have read further than that."""
    whole = given(loader(num_workers=num_workers), 20)
    first = loader(num_workers=num_workers)
    assert given(first, done) == whole[:done]
    again = loader(num_workers=num_workers)
    again.load_state_dict(json.loads(json.dumps(first.state_dict()), object_hook=int_keys))
    assert given(again, 20 - done) == whole[done:]
    assert given(first, 20 - done) == whole[done:], "also without a checkpoint, if it is iterated again"


@pytest.mark.filterwarnings("ignore:.*worker processes in total")
@pytest.mark.parametrize("now", [0, 1, 3])
def test_another_number_of_workers_gives_the_same_batches(now):
    first = loader(num_workers=2)
    given(first, 3)
    again = loader(num_workers=now)
    again.load_state_dict(first.state_dict())
    assert again.num_workers == min(now, 2)
    assert given(again, 9) == given(first, 9)


def int_keys(value):
    return {int(key) if key.isdigit() else key: each for key, each in value.items()}


@pytest.mark.parametrize(("before", "now"), [(2, 4), (4, 2), (2, 1), (2, 3), (3, 2)])
def test_another_number_of_ranks_repeats_and_loses_nothing_and_says_so(before, now, caplog):
    loaders = [loader(rank=rank, num_ranks=before, num_workers=2) for rank in range(before)]
    seen = [batch for made in loaders for batch in given(made, 5)]
    states = [made.state_dict() for made in loaders]
    for rank in range(now):
        made = loader(rank=rank, num_ranks=now, num_workers=2)
        with caplog.at_level("INFO"):
            made.load_state_dict(made.divide(states))
        assert f"{2 * before} streams of {before} ranks continue on {now}. No document is repeated" in caplog.text
        assert made.num_workers in (1, 2)
        seen += given(made, 20)
    tokens = [token for batch in seen for token in batch]
    assert len(tokens) == len({*tokens})


def test_too_few_streams_for_the_ranks_begin_anew_and_say_so(caplog):
    made = loader(rank=2, num_ranks=3)
    with caplog.at_level("INFO"):
        state = made.divide([loader().state_dict()])
    assert "1 streams, too few for 3 ranks. All begin anew, so documents are repeated" in caplog.text
    assert state == made.state_dict()


def test_other_data_and_another_rank_are_named():
    saved = loader(rank=1, num_ranks=2).state_dict()
    with pytest.warns(UserWarning, match="rank 0 reads from the beginning"):
        loader().load_state_dict(saved)
    with pytest.warns(UserWarning, match="saved with other sources"):
        loader(checksum=1).load_state_dict(loader().state_dict())


def test_batches_can_be_read_ahead_of_their_step():
    made = loader(num_workers=1)
    iterator = iter(made)
    assert why_not(made, iterator) is None
    ahead, _ = read_ahead(iterator)
    before = made.state_dict()
    assert next(iterator) is ahead
    assert made.state_dict() != before
