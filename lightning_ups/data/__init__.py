"""Datamodules: packed tokens of files and streams, labeled texts, random tokens, fields, and latents of an encoder."""

from lightning_ups.data.fields import GeneratedFields, StoredFields
from lightning_ups.data.labeled_text import LabeledText
from lightning_ups.data.latents import PrecomputedLatents
from lightning_ups.data.packed_tokens import PackedBatch, PackedTokens
from lightning_ups.data.random_tokens import RandomTokens
from lightning_ups.data.stdlib_text import StdlibText
from lightning_ups.data.streamed_tokens import StreamedTokens
from lightning_ups.data.workers import tune_workers

__all__ = [
    "GeneratedFields",
    "LabeledText",
    "PackedBatch",
    "PackedTokens",
    "PrecomputedLatents",
    "RandomTokens",
    "StdlibText",
    "StoredFields",
    "StreamedTokens",
    "tune_workers",
]
