"""Streams of documents: where they come from, how they become batches, and the position in them."""

from lightning_ups.data.streaming.documents import held_out_documents, open_source, shards_of
from lightning_ups.data.streaming.lanes import Recipe
from lightning_ups.data.streaming.loader import StreamLoader, Streams

__all__ = ["Recipe", "StreamLoader", "Streams", "held_out_documents", "open_source", "shards_of"]
