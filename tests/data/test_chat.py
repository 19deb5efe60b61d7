import json
import pickle

import numpy as np
import pytest

from lightning_ups.data import PackedTokens, StreamedTokens
from lightning_ups.data.chat import content_of, load_chat_encoder, marked_text
from lightning_ups.data.token_folder import TokenFolder
from tests.chats import CHAT, MARKED, PLAIN, THINKING, chat_tokenizer, chats, says

pytest.importorskip("transformers", minversion="5")


def text_of(encoder, chat):
    return marked_text(encoder.tokenizer, encoder.one(chat)).replace("\n", "")


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_answers_and_their_ends_are_learned(tmp_path, template):
    encoder = load_chat_encoder(chat_tokenizer(tmp_path, template))
    expected = "<eos> <|system|> w1 <|end|> <|user|> w2 w3 <|end|> <|assistant|>[[w4 <|end|>]]"
    expected += "<|user|> w4 <|end|> <|assistant|>[[w5 w6 <|end|>]]"
    assert text_of(encoder, CHAT) == expected
    tokens = encoder.one(CHAT)
    assert np.where(tokens < 0, ~tokens, tokens).tolist() == encoder.tokenizer.apply_chat_template(
        CHAT, return_dict=False
    )


def test_thoughts_and_calls_are_learned_where_the_template_has_them(tmp_path):
    encoder = load_chat_encoder(chat_tokenizer(tmp_path, THINKING))
    chat = [
        says("user", "w1"),
        says("assistant", "w2", reasoning_content="w9", tool_calls=[{"name": "w8"}]),
        says("user", "w3"),
        says("assistant", "w4", reasoning_content="w7"),
    ]
    assert text_of(encoder, chat) == (
        "<|user|> w1 <|end|> <|assistant|>[[w2 <call> w8 <|end|>]]<|user|> w3 <|end|>"
        " <|assistant|>[[<think> w7 </think> w4 <|end|>]]"
    )


def test_the_end_of_a_turn_is_learned_where_the_last_one_ends_otherwise(tmp_path):
    encoder = load_chat_encoder(chat_tokenizer(tmp_path, PLAIN.replace("{% endfor %}", "{% endfor %}{{ eos_token }}")))
    learned = [int(token) for token in encoder.one(CHAT) if token >= 0]
    assert encoder.tokenizer.decode(learned).replace("\n", "").split(" ") == [
        "w4",
        "<|end|>",
        "w5",
        "w6",
        "<|end|>",
        "<eos>",
    ]


def test_a_template_that_leaves_answers_out_is_refused(tmp_path):
    encoder = load_chat_encoder(chat_tokenizer(tmp_path, PLAIN.replace("message.content", "message.text")))
    with pytest.raises(ValueError, match="leaves out the content of message 2"):
        encoder.one(CHAT)


def test_a_template_that_hides_answers_needs_marks(tmp_path):
    hiding = "{% for message in messages %}{{ messages[-1].content }} {{ message.content }}{% endfor %}"
    encoder = load_chat_encoder(chat_tokenizer(tmp_path, hiding))
    with pytest.raises(ValueError, match=r"\{% generation %\}"):
        encoder.one([says("user", "w1"), says("assistant", "w2"), says("user", "w3"), says("assistant", "w4")])


def test_a_prompt_is_what_a_user_says(tmp_path):
    encoder = pickle.loads(pickle.dumps(load_chat_encoder(chat_tokenizer(tmp_path))))
    assert encoder.tokenizer.decode(encoder.prompt("w1")).replace("\n", "") == "<eos> <|user|> w1 <|end|> <|assistant|>"


def test_a_conversation_has_one_content_however_it_is_stored():
    stored = [{"content": "a", "role": "user", "tool_calls": None}]
    assert content_of(stored) == content_of([says("user", "a")])
    assert content_of([says("user", "\ud800")]) == content_of([says("user", "?")])
    for wrong in ("text", [], ["a"], [{"from": "human", "value": "a"}], None):
        with pytest.raises(ValueError, match="is no conversation"):
            content_of(wrong)


def test_a_tokenizer_without_a_template_needs_a_file(tmp_path):
    folder = chat_tokenizer(tmp_path / "tokenizer", None)
    with pytest.raises(ValueError, match=r"chat=template\.jinja"):
        load_chat_encoder(folder)
    (tmp_path / "own.jinja").write_text(PLAIN)
    assert len(load_chat_encoder(folder, template=str(tmp_path / "own.jinja")).one(CHAT))
    with pytest.raises(ValueError, match="has no chat template"):
        load_chat_encoder("bytes")


def conversations(count):
    return [
        [says("user", f"w{1 + index % 59} w2 w3"), says("assistant", f"w{1 + index % 59} w4")] for index in range(count)
    ]


def tokenized(ups, path, some, *options):
    source, tokenizer = chats(path / "chat.jsonl", some), chat_tokenizer(path / "tokenizer")
    done = ups("tokenize", "--source", source, "--tokenizer", tokenizer, "--output", "tokens", "--chat", *options)
    assert done.code == 0, done.err
    return TokenFolder("tokens"), load_chat_encoder(tokenizer)


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_tokenize_and_inspect(ups, tmp_path, workers):
    some = [*conversations(5), [says("user", "w1")]]  # the last has nothing to learn
    folder, encoder = tokenized(ups, tmp_path, some, "--workers", str(workers))
    assert folder.tokens.tolist() == np.concatenate([encoder.one(chat) for chat in some[:5]]).tolist()
    assert folder.lengths.tolist() == [len(encoder.one(chat)) for chat in some[:5]]
    shown = ups("inspect", "tokens", "--seq-len", "16").out
    assert "[[w4 w4 <|end|>]]" in shown or "<|assistant|>[[" in shown
    report = json.loads(ups("inspect", "tokens", "--json").out)
    assert report["learned"] == np.mean(folder.tokens >= 0)


def test_what_is_no_conversation_is_one_line(ups, tmp_path):
    tokenizer = chat_tokenizer(tmp_path / "tokenizer")
    common = ("tokenize", "--tokenizer", tokenizer, "--workers", "1", "--output", "out", "--source")
    chats(tmp_path / "texts.jsonl", ["w1"])
    (tmp_path / "a.txt").write_text("w1")
    for words, part in [
        (("texts.jsonl", "--chat"), "no messages in 'messages', but str"),
        (("a.txt", "--chat"), "--chat needs JSON Lines"),
        ((chats(tmp_path / "chat.jsonl", [CHAT]), "--field", "messages"), "Add --chat"),
    ]:
        done = ups(*common, *words)
        assert done.code == 2
        assert part in " ".join(done.err.split())


def learned(batches, encoder):
    """Return the texts that are targets of batches, one for each answer."""
    texts = []
    for batch in batches:
        targets = batch.targets.flatten()
        texts += encoder.tokenizer.decode(targets[targets >= 0]).replace("\n", "").split("<|end|>")[:-1]
    return sorted(text.strip() for text in texts)


@pytest.mark.parametrize("packing", ["best_fit", "greedy"])
def test_packing_keeps_what_is_learned(ups, tmp_path, packing):
    some = conversations(40)
    _, encoder = tokenized(ups, tmp_path, some, "--workers", "1")
    data = PackedTokens("tokens", seq_len=24, batch_size=1, packing=packing, val_fraction=0, num_workers=0)
    data.setup("fit")
    batches = [*data.train_dataloader()]
    targets = sorted(int(target) for batch in batches for target in batch.targets.flatten() if target >= 0)
    assert targets == sorted(int(token) for chat in some for token in encoder.one(chat) if token >= 0)
    assert all((batch.tokens >= 0).all() for batch in batches)
    assert data.encode("w1") == encoder.prompt("w1")
    assert "w1" in data.decode(data.encode("w1"))


def test_rows_without_an_answer_are_left_out(ups, tmp_path):
    long = [[says("user", "w1 " * 100), says("assistant", "w2")]] * 3
    tokenized(ups, tmp_path, [*long, *conversations(3)], "--workers", "1")
    data = PackedTokens("tokens", seq_len=10, batch_size=1, val_fraction=0, num_workers=0)
    data.setup("fit")
    rows = [data.train_rows[index] for index in range(len(data.train_rows))]
    assert all((row.targets >= 0).any() for row in rows)
    assert sum(int((row.targets >= 0).sum()) for row in rows) == 3 * 2 + 3 * 3


def test_streams_have_the_same_answers(tmp_path):
    some, tokenizer = conversations(30), chat_tokenizer(tmp_path / "tokenizer")
    data = StreamedTokens(
        [some], tokenizer=tokenizer, chat=True, seq_len=24, batch_size=1, val_fraction=0.2, num_workers=0
    )
    data.setup("fit")
    encoder = load_chat_encoder(tokenizer)
    stream = iter(data.train_dataloader())
    found = {*learned([next(stream) for _ in range(40)], encoder), *learned(data.val_dataloader(), encoder)}
    assert found == {chat[1]["content"] for chat in some}
    assert data.encode("w1") == encoder.prompt("w1")
