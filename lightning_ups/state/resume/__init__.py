"""Going on within an epoch as if nothing had happened: the same samples, the same random numbers."""

from lightning_ups.state.resume.connection import Connection
from lightning_ups.state.resume.resumption import RESUME_KEY, OnUnreplayable, Progress, Resumption

__all__ = ["RESUME_KEY", "Connection", "OnUnreplayable", "Progress", "Resumption"]
