"""Exact resuming within an epoch: the same samples, and the same random numbers."""

from lightning_ups.state.resume.resumption import RESUME_KEY, Connection, OnUnreplayable, Resumption

__all__ = ["RESUME_KEY", "Connection", "OnUnreplayable", "Resumption"]
