"""Datamodules: text that every machine has, and random tokens for benchmarks."""

from lightning_ups.data.random_tokens import RandomTokens
from lightning_ups.data.stdlib_text import StdlibText

__all__ = ["RandomTokens", "StdlibText"]
