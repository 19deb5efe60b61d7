"""Datamodules: packed tokens of files and streams, labeled texts, random tokens, and latents of a frozen encoder."""

from lightning_ups.data.labeled_text import LabeledText
from lightning_ups.data.latents import PrecomputedLatents
from lightning_ups.data.packed_tokens import PackedBatch, PackedTokens
from lightning_ups.data.random_tokens import RandomTokens
from lightning_ups.data.stdlib_text import StdlibText
from lightning_ups.data.streamed_tokens import StreamedTokens
from lightning_ups.data.workers import tune_workers

__all__ = [
    "LabeledText",
    "PackedBatch",
    "PackedTokens",
    "PrecomputedLatents",
    "RandomTokens",
    "StdlibText",
    "StreamedTokens",
    "tune_workers",
]
