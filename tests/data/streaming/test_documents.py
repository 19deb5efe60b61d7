import gzip
import json
import sys
from collections import Counter
from itertools import islice

import pytest

from lightning_ups._compat.optional.tokenizers import Encoder, load_encoding
from lightning_ups.data.streaming.documents import Place, Reader, held_out_documents, open_source, shards_of
from lightning_ups.data.token_folder import TokenFolder
from tests.token_files import jsonl

TEXTS = [f"text {index}" for index in range(103)]


def pooled(dataset, lanes, field="text"):
    shards = shards_of(dataset, lanes=lanes, field=field)
    return [(shards, number) for number in range(shards.num_shards)]


def reader(dataset, *, lane=0, lanes=1, block=10, seed=(0,), held_out=0.0):
    return Reader(pooled(dataset, lanes), lane=lane, lanes=lanes, block=block, seed=seed, held_out=held_out)


def one_pass(*args, place=None, **options):
    return [text for _, text in reader(*args, **options).one_pass(place or Place())]


def parquet(path, texts):
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": texts, "more": [0] * len(texts)}), path, row_group_size=20)


@pytest.fixture(
    params=[
        "list",
        "jsonl",
        "jsonl.gz",
        "parquet",
        "txt",
        "save_to_disk",
        "save_to_disk of splits",
        "litdata",
        "dataset",
    ]
)
def source(request, tmp_path):
    """The same texts in each form, in one file and in several."""
    kind = request.param
    if kind == "list":
        return [*TEXTS]
    datasets = pytest.importorskip("litdata" if kind == "litdata" else "datasets")
    name = str(tmp_path / "data")
    if kind == "dataset":
        return datasets.Dataset.from_dict({"text": TEXTS})
    if kind.startswith("save_to_disk"):
        made = datasets.Dataset.from_dict({"text": TEXTS})
        (datasets.DatasetDict({"train": made}) if kind.endswith("splits") else made).save_to_disk(name)
    elif kind == "litdata":
        made_of_chunks(datasets, name)
    elif kind == "txt":
        (tmp_path / "data").mkdir()
        for text in TEXTS[:25]:
            (tmp_path / "data" / f"{text}.txt").write_text(text)
    else:
        (tmp_path / "data").mkdir()
        for number in range(3):
            texts, file = TEXTS[number::3], tmp_path / "data" / f"{number}.{kind}"
            if kind == "parquet":
                parquet(file, texts)
            elif kind == "jsonl":
                jsonl(file, texts, more=0)
            else:
                file.write_bytes(gzip.compress("".join(json.dumps({"text": text}) + "\n" for text in texts).encode()))
    return name


def made_of_chunks(litdata, name):
    from litdata.streaming.writer import BinaryWriter

    writer = BinaryWriter(name, chunk_size=10)
    for index, text in enumerate(TEXTS):
        writer[index] = {"text": text}
    writer.done()
    writer.merge()


@pytest.mark.parametrize("lanes", [1, 2, 3, 4])
def test_lanes_together_read_each_document_once_in_a_random_order(source, lanes):
    dataset = open_source(source)
    texts = [one_pass(dataset, lane=lane, lanes=lanes) for lane in range(lanes)]
    found = Counter(text for lane in texts for text in lane)
    expected = TEXTS[:25] if "text 30" not in found else TEXTS
    assert found == Counter(expected)
    assert min(map(len, texts)) > 0
    assert texts[0] != sorted(texts[0])
    assert texts[0] == one_pass(dataset, lane=0, lanes=lanes), "the order is that of the seed"
    if lanes == 1:
        assert texts[0] != one_pass(dataset, seed=(1,))


def test_reading_continues_from_each_place(source):
    dataset = open_source(source)
    whole = [*islice(reader(dataset, lane=1, lanes=2).documents(Place()), 70)]
    texts = [text for _, text in whole]
    for index in range(0, 60, 7):
        place = Place(*json.loads(json.dumps(whole[index][0])))
        behind = islice(reader(dataset, lane=1, lanes=2).documents(place), 69 - index)
        assert [text for _, text in behind] == texts[index + 1 :]


def test_a_later_pass_has_another_order():
    texts = [text for _, text in islice(reader(TEXTS).documents(Place()), 206)]
    assert Counter(texts[:103]) == Counter(texts[103:]) == Counter(TEXTS)
    assert texts[:103] != texts[103:]


def test_without_shuffling_documents_keep_their_order():
    assert one_pass(TEXTS, block=0) == TEXTS


def test_validation_is_by_the_rule_of_token_folders(tmp_path):
    """Also for a source of several shards, and for tokens in place of text."""
    train, val = one_pass(TEXTS, held_out=0.2), [*held_out_documents(pooled(TEXTS, 1), 0.2)]
    assert Counter(train + val) == Counter(TEXTS)
    pytest.importorskip("tokenizers")
    from lightning_ups.data.token_folder import TokenWriter

    tokens, lengths, hashes = Encoder(load_encoding("bytes", bos=None, eos=None))(TEXTS)
    writer = TokenWriter(tmp_path, recipe={}, dtype="uint16")
    writer.append(tokens, lengths, hashes)
    writer.finish(tokenizer="")
    out = TokenFolder(tmp_path).held_out(0.2)
    assert val == [text for text, held in zip(TEXTS, out, strict=True) if held]
    numbers = [[index, 1] for index in range(60)]
    assert 0 < len([*held_out_documents(pooled(numbers, 1), 0.2)]) < 30


def test_empty_documents_are_left_out():
    assert one_pass(["a", "", None, "b"], block=0) == ["a", "b"]


def test_too_few_documents_are_named():
    with pytest.raises(ValueError, match="fewer documents than ranks x workers"):
        next(reader(["a", "b"], lane=2, lanes=3).documents(Place()))


def test_what_is_missing_is_named_in_a_line(tmp_path, monkeypatch):
    with pytest.raises(TypeError, match="and not int"):
        shards_of(1, lanes=1, field="text")
    with pytest.raises(ValueError, match="Its fields: body"):
        one_pass([{"body": "a"}])
    monkeypatch.setitem(sys.modules, "litdata", None)
    with pytest.raises(ImportError, match=r"pip install .*'litdata>="):
        open_source("s3://bucket/chunks/")
    pytest.importorskip("datasets")
    for name in ("./none", "none*.jsonl", "none.parquet"):
        with pytest.raises(FileNotFoundError, match="does not exist"):
            open_source(name)
    with pytest.raises(FileNotFoundError, match="has no"):
        open_source(str(tmp_path))
    (tmp_path / "bad.parquet").write_text("no table")
    with pytest.raises(Exception, match="parquet"):
        one_pass(open_source(str(tmp_path)))


def test_without_a_network_the_local_alternative_is_named(monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(
        FileNotFoundError, match=r"nobody/nothing:config is not a local file.*DIR/\*\.parquet"
    ) as caught:
        open_source("nobody/nothing:config")
    assert "\n" not in str(caught.value)
