"""Settings of inductor that have no public name, each held while a context is open."""

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["combined_kernels", "eager_precision_casts", "eager_random_numbers", "tuned_blocks"]


@contextmanager
def combined_kernels() -> Iterator[None]:
    """Let small kernels that do not wait for one another, such as maxima of weights, be launched as one."""
    with _set("combo_kernels"):
        yield


@contextmanager
def eager_precision_casts() -> Iterator[None]:
    """Let compiled code round between operations where eager code does.

    Without it a value that is recomputed can differ from the one that was rounded, and scales of rows computed from the
    two disagree: losses become NaN (pytorch#150859).
    """
    with _set("emulate_precision_casts"):
        yield


@contextmanager
def eager_random_numbers() -> Iterator[None]:
    """Let compiled code draw the random numbers that eager code would."""
    with _set("fallback_random"):
        yield


@contextmanager
def tuned_blocks() -> Iterator[None]:
    """Let compiled code try more sizes of the blocks in which a kernel goes through its data, which takes minutes."""
    with _set("coordinate_descent_tuning"):
        yield


@contextmanager
def _set(name: str) -> Iterator[None]:
    from torch._inductor import config  # which takes its time to import

    # What is set holds in this thread alone, and a backward may be compiled in one of autograd's: these see defaults.
    entry = config._config[name]  # pyright: ignore[reportAttributeAccessIssue]
    before = entry.default
    with config.patch({name: True}):
        entry.default = True
        try:
            yield
        finally:
            entry.default = before
