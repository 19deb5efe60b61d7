import json
from itertools import chain, islice

import numpy as np
import pytest

from lightning_ups._compat.optional.tokenizers import Encoder, load_encoding
from lightning_ups.data.streaming.lanes import Recipe, pool

pytest.importorskip("tokenizers")
NUMBERED = [[*range(start, start + 9)] for start in range(0, 900, 9)]  # each token is found once


def recipe(*sources, weights=None, **options):
    defaults = {
        "field": "text",
        "encoder": Encoder(load_encoding("bytes", bos=None, eos=None)),
        "seq_len": 8,
        "batch_size": 2,
        "block": 10,
        "held_out": 0.0,
        "seed": 0,
    }
    weights = weights or [1 / len(sources)] * len(sources)
    return Recipe(sources=[[source] for source in sources], weights=weights, **{**defaults, **options})


def text(tokens):
    """Return the letters of tokens, and a bar for each end of a document."""
    return "".join("|" if token == 256 else chr(token + ord("!")) for token in tokens.flatten().tolist())


def test_documents_are_concatenated_without_padding_and_keep_their_boundaries():
    texts = ["abc", "defghij", "k"] * 9
    batch, state = next(recipe(texts, block=0).batches(0, 1, None))
    assert text(batch.tokens) == "abcdefghijkabcde"
    assert text(batch.targets) == "bc|efghij||bc|ef"
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 0, 0, 1, 2, 0, 1]]
    assert batch.documents.cu_seqlens.tolist() == [0, 3, 8, 10, 11, 14, 16]
    assert (state["done"], state["used"]) == ([14], 2), "the last document has one prediction left"


def test_each_prediction_is_in_one_row():
    batches = islice(recipe(NUMBERED).batches(0, 1, None), 50)  # 16 of the 800 predictions in each
    pairs = [(batch.tokens.flatten().tolist(), batch.targets.flatten().tolist()) for batch, _ in batches]
    assert all(target == token + 1 for tokens, targets in pairs for token, target in zip(tokens, targets, strict=True))
    found = sorted(chain.from_iterable(tokens for tokens, _ in pairs))
    assert found == [token for document in NUMBERED for token in document[:-1]]


def test_a_lane_continues_from_each_state():
    """Of a mixture of texts of many lengths, also longer than a batch."""
    random = np.random.default_rng(0)
    texts = [["x" * length for length in random.integers(1, 80, 50)] for _ in range(2)]
    made = recipe(*texts, weights=[0.3, 0.7])
    whole = [*islice(made.batches(1, 2, None), 60)]
    for index in range(0, 50, 3):
        again = islice(made.batches(1, 2, json.loads(json.dumps(whole[index][1]))), 9)
        for (batch, state), (expected, before) in zip(again, whole[index + 1 :], strict=False):
            assert batch.tokens.tolist() == expected.tokens.tolist()
            assert batch.documents.cu_seqlens.tolist() == expected.documents.cu_seqlens.tolist()
            assert json.dumps(state) == json.dumps(before)


def test_weights_are_shares_of_the_predictions():
    batches = islice(recipe(["a" * 30] * 100, ["b" * 5] * 100, weights=[0.25, 0.75]).batches(0, 1, None), 200)
    letters = "".join(text(batch.tokens) for batch, _ in batches)
    assert letters.count("b") / len(letters) == pytest.approx(0.75, abs=0.01)


def test_several_datasets_can_be_read_as_one():
    shards = pool([["a", "b"], ["c"]], lanes=1, field="text")
    assert [text for source, shard in shards for block, _ in source.blocks(shard, None, 5) for text in block] == [
        "a",
        "b",
        "c",
    ]
