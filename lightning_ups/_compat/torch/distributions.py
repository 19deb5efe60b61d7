"""What torch.distributions checks of numbers, where tensors have none."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributions import Distribution

__all__ = ["without_checks"]


@contextmanager
def without_checks() -> Iterator[None]:
    """Let distributions that are made while the context is open check no argument, unless they are told to."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)
