"""Context parallelism: splits sequences over ranks."""

from lightning_ups.transforms.context_parallel.region import ContextParallel

__all__ = ["ContextParallel"]
