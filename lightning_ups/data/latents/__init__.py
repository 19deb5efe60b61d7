"""Latents of a frozen encoder, written during the first pass over the data and read afterwards."""

from lightning_ups.data.latents.datamodule import PrecomputedLatents

__all__ = ["PrecomputedLatents"]
