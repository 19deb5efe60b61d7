import json

import pytest
import torch

from lightning_ups.data import LabeledText
from tests.chats import chat_tokenizer

pytest.importorskip("transformers", minversion="5")
RECORDS = [{"text": f"w{i % 50 + 1} w{i // 50 + 1} w3"[: 5 + i % 4], "label": ["no", "yes"][i % 2]} for i in range(80)]


def data(path, records=RECORDS, **options):
    folder = chat_tokenizer(path / "tokenizer")
    (path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    options = {"batch_size": 4, "num_workers": 0, "val_fraction": 0.2, **options}
    made = LabeledText(str(path / "*.jsonl"), tokenizer=folder, **options)
    made.setup("fit")
    return made


def seen(loader):
    return [label for batch in loader for label in batch["labels"].tolist()]


def test_each_text_is_on_one_side_and_batches_are_padded(tmp_path):
    made = data(tmp_path, batch_size=1)
    assert made.names == ["no", "yes"]
    assert len(seen(made.train_dataloader())) + len(seen(made.val_dataloader())) == 80
    assert made._val == data(tmp_path)._val
    batch = next(iter(data(tmp_path).train_dataloader()))
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (4, 8)
    assert batch["labels"].dtype == torch.int64


@pytest.mark.parametrize(
    ("labels", "names", "numbers"),
    [
        ([2, 0], ["0", "1", "2"], [2, 0]),
        (["10", "9"], [str(i) for i in range(11)], [10, 9]),
        (["b", "a"], ["a", "b"], [1, 0]),
        ([[0, 1], [1, 1]], ["0", "1"], [[0.0, 1.0], [1.0, 1.0]]),
    ],
)
def test_labels_are_numbered(tmp_path, labels, names, numbers):
    made = data(tmp_path, [{"text": "w1", "label": each} for each in labels], val_fraction=0, batch_size=2)
    assert made.names == names
    assert made.num_labels == len(names)
    batch = made._loader(made._train)
    assert next(iter(batch))["labels"].tolist() == numbers


def test_csv_and_pairs(tmp_path):
    (tmp_path / "a.csv").write_text("a,b,y\nw1,w2 w3,1\nw4,w5,0\n")
    made = LabeledText(
        str(tmp_path / "a.csv"), tokenizer=chat_tokenizer(tmp_path / "t"), batch_size=2, text="a", pair="b", label="y",
        val_fraction=0, num_workers=0, max_length=2,
    )  # fmt: skip
    made.setup("fit")
    assert [each["labels"] for each in made._train] == [1, 0]
    assert all(len(each["input_ids"]) == 2 for each in made._train)


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        LabeledText("no.jsonl", tokenizer=chat_tokenizer(tmp_path / "t"), batch_size=1).setup("fit")
    with pytest.raises(ValueError, match=r"without 'label'\. Its fields: text"):
        data(tmp_path, [{"text": "w1"}])
    with pytest.raises(ValueError, match="Use more texts"):
        data(tmp_path, batch_size=100)
