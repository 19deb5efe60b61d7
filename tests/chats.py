"""Conversations, and chat templates as known models have them."""

import json

from tests.token_files import WORDS, tokenizer

# A header for each message, and no marks.
PLAIN = """{{ bos_token }}{% for message in messages %}<|{{ message.role }}|> {{ message.content | trim }} <|end|>
{% endfor %}{% if add_generation_prompt %}<|assistant|> {% endif %}"""
# The same, with marks.
MARKED = """{{ bos_token }}{% for message in messages %}<|{{ message.role }}|> {% if message.role == 'assistant' %}\
{% generation %}{{ message.content | trim }} <|end|>{% endgeneration %}
{% else %}{{ message.content | trim }} <|end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|> {% endif %}"""
# Thoughts are kept in the last answer alone, which has some in any case.
THINKING = """{% for message in messages %}<|{{ message.role }}|> \
{% if message.role == 'assistant' and loop.last %}<think> {{ message.reasoning_content or '' }} </think> {% endif %}\
{{ message.content }}{% for call in message.tool_calls or [] %} <call> {{ call.name }}{% endfor %} <|end|>
{% endfor %}{% if add_generation_prompt %}<|assistant|> {% endif %}"""
SPECIAL = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<think>", "</think>", "<call>"]


def says(role, content, **more):
    return {"role": role, "content": content, **more}


CHAT = [
    says("system", "w1"),
    says("user", "w2 w3"),
    says("assistant", " w4 "),
    says("user", "w4"),
    says("assistant", "w5 w6"),
]


def chat_tokenizer(path, template=PLAIN):
    """Save a tokenizer of words, and return its folder."""
    from transformers import PreTrainedTokenizerFast

    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer(), bos_token=WORDS[0], eos_token=WORDS[0])
    made.add_special_tokens({"additional_special_tokens": SPECIAL})
    made.chat_template = template
    made.save_pretrained(path)
    return str(path)


def chats(path, conversations, *, field="messages"):
    path.write_text("".join(json.dumps({field: each}) + "\n" for each in conversations), encoding="utf-8")
    return str(path)
