"""What the compiler advises, where its usual advice cannot be taken."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def advice_for_one_graph(part: str) -> Iterator[None]:
    """Replace the advice to name other blocks in errors that leave the context by what helps.

    Args:
        part: The strategy under which each outermost submodule is one graph.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:
        said, advised, _ = str(error).partition("Compile(blocks=")
        if not advised:
            raise
        kind = ValueError if isinstance(error, ValueError) else RuntimeError
        raise kind(
            f"{said.rpartition('. ')[0]}. {part} makes one graph of each outermost submodule that training_step calls,"
            " with the gathers of parameters in it, and no part of one can be left out."
            " Change what stands in the way, or use FSDP2Strategy, under which blocks are compiled one by one."
        ) from error.__cause__


def advice_if_uncompiled(part: str) -> str:
    """Return what to add where a root does not compile under the strategy ``part``."""
    return f" What is uncompiled gathers each parameter by itself under {part}: FSDP2Strategy may be faster."
