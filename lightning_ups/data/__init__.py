"""Datamodules: packed tokens of files and streams, labeled texts, the standard library's text, and random tokens."""

from lightning_ups.data.labeled_text import LabeledText
from lightning_ups.data.packed_tokens import PackedBatch, PackedTokens
from lightning_ups.data.random_tokens import RandomTokens
from lightning_ups.data.stdlib_text import StdlibText
from lightning_ups.data.streamed_tokens import StreamedTokens
from lightning_ups.data.workers import tune_workers

__all__ = [
    "LabeledText",
    "PackedBatch",
    "PackedTokens",
    "RandomTokens",
    "StdlibText",
    "StreamedTokens",
    "tune_workers",
]
