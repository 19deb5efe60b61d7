"""Conversations as tokens, by the chat template of a tokenizer. Only answers are to be learned."""

import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lightning_ups._compat.optional.packages import require
from lightning_ups._compat.optional.tokenizers import content_hash

DTYPE = "int32"
_PROBE = "\N{SNOWMAN}answer\N{SNOWMAN}"
_MARKS = re.compile(r"\{%[-+]?\s*generation\b")
Array = np.ndarray[Any, Any]


def load_chat_encoder(name: str | Path, *, template: str | bool = True) -> "ChatEncoder":
    """Return the encoder of a tokenizer.

    Args:
        name: A folder with a tokenizer, or its name on the Hugging Face Hub.
        template: The file of a Jinja template, or True for the tokenizer's own.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the tokenizer has no chat template.
    """
    transformers = require("transformers", requirement="transformers>=5", extra="hf", feature="chat data")
    if name == "bytes" or Path(name).is_file():
        raise ValueError(f"tokenizer {name} has no chat template. Give a folder that save_pretrained wrote, or a name.")
    tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    if isinstance(template, str):
        tokenizer.chat_template = Path(template).read_text(encoding="utf-8")
    if not tokenizer.chat_template:
        raise ValueError(f"tokenizer {name} has no chat template. Name a file with one: chat=template.jinja.")
    return ChatEncoder(tokenizer)


class ChatEncoder:
    """Encodes conversations, which are lists of messages such as ``{"role": "user", "content": "Hi"}``.

    The tokens of answers are to be learned: what the template marks by ``{% generation %}``, or, without such marks,
    what follows the header of an assistant's message until the end of its turn. All other tokens are stored as their
    complement ``~token``, which is negative: as inputs, and not as targets.

    Args:
        tokenizer: A fast tokenizer of transformers with a chat template.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._marked = _MARKS.search(tokenizer.get_chat_template()) is not None

    def __call__(self, chats: Iterable[Any]) -> tuple[Array, Array, Array]:
        """Return the tokens of all conversations with an answer, the number of tokens and the hash of each."""
        chats = [*chats]
        tokens = [self.one(chat) for chat in chats]
        hashes = b"".join(content_hash(content_of(c)) for c, found in zip(chats, tokens, strict=True) if len(found))
        lengths = np.array([len(found) for found in tokens if len(found)], np.uint32)
        return np.concatenate([np.empty(0, DTYPE), *tokens]), lengths, np.frombuffer(hashes, "<u8")

    def one(self, chat: Any) -> Array:
        """Return the tokens of a conversation: none if it has no answer."""
        messages = json.loads(content_of(chat))
        if not any(message["role"] == "assistant" for message in messages):
            return np.empty(0, DTYPE)
        if self._marked:
            found = self._apply(messages, return_dict=True, return_assistant_tokens_mask=True)
            tokens, learned = found["input_ids"], np.array(found["assistant_masks"], bool)
        else:
            text = self._apply(messages, tokenize=False)
            found = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            tokens, places = found["input_ids"], np.array(found["offset_mapping"])
            learned = np.zeros(len(tokens), bool)
            for start, end, end_of_turn in self._answers(messages, text):
                learned |= (places[:, 1] > start) & ((places[:, 0] < end) | (places[:, 1] <= end_of_turn))
        tokens = np.array(tokens, DTYPE)
        return np.where(learned, tokens, ~tokens)

    def prompt(self, text: str) -> list[int]:
        """Return the tokens of a conversation in which a user has said ``text``, and the answer comes next."""
        return self._apply([{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False)

    def _answers(self, messages: Sequence[dict[str, Any]], text: str) -> Iterator[tuple[int, int, int]]:
        """Yield where each answer begins and ends in ``text``, and where its turn ends.

        They are found by what the template makes of another answer.
        """
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = messages[:index]
            other: dict[str, Any] = {"role": "assistant", "content": _PROBE}
            if isinstance(message.get("content"), list):
                other["content"] = [{"type": "text", "text": _PROBE}]
            head, found, tail = self._apply([*before, other, *messages[index + 1 :]], tokenize=False).partition(_PROBE)
            end_of_turn = self._apply([*before, other], tokenize=False).partition(_PROBE)[2]
            asked = self._apply(before, add_generation_prompt=True, tokenize=False) if before else head
            start = next((len(each) for each in (asked, head) if text.startswith(each)), None)
            if not found or start is None or not text.endswith(tail):
                raise ValueError(
                    f"The chat template leaves out the content of message {index}, or changes others with it, so the"
                    " answer is not found. Put {% generation %} and {% endgeneration %} around answers in a template of"
                    " your own."
                )
            end = len(text) - len(tail)
            # Of the characters that follow each answer, so of the next header, too; only full tokens count.
            yield start, end, end + len(os.path.commonprefix((tail, end_of_turn)).rstrip())  # noqa: RUF071

    def _apply(self, messages: Sequence[dict[str, Any]], **options: Any) -> Any:
        try:
            return self.tokenizer.apply_chat_template(messages, **options)
        except Exception as error:  # noqa: BLE001  (whatever a template raises)
            roles = ", ".join(message["role"] for message in messages)
            raise ValueError(f"The chat template refuses messages of {roles}: {error}") from None


def content_of(chat: Any) -> bytes:
    """Return the messages of a conversation as JSON, the same for each way to store them.

    Raises:
        ValueError: If they are no messages.
    """
    messages = [*chat] if isinstance(chat, Sequence) and not isinstance(chat, str) else []
    if not messages or not all(isinstance(each, dict) and isinstance(each.get("role"), str) for each in messages):
        raise ValueError(f'{str(chat)[:60]!r} is no conversation. It is [{{"role": "user", "content": "Hi"}}, ...].')
    # Tables have each key in each message.
    kept = [{key: each[key] for key in each if each[key] is not None or key == "content"} for each in messages]
    return json.dumps(kept, ensure_ascii=False, sort_keys=True).encode(errors="replace")


def marked_text(tokenizer: Any, tokens: Array) -> str:
    """Return the text of ``tokens``; of a conversation, what is to be learned is between ``[[`` and ``]]``."""
    if tokens.dtype.kind == "u":
        return tokenizer.decode(tokens.tolist(), skip_special_tokens=False)
    parts = ((key, [*group]) for key, group in itertools.groupby(tokens.tolist(), lambda token: token >= 0))
    texts = (
        (key, tokenizer.decode([t if key else ~t for t in some], skip_special_tokens=False)) for key, some in parts
    )
    return "".join(f"[[{text}]]" if learned else text for learned, text in texts)
