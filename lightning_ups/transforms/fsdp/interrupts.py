"""Keeps a KeyboardInterrupt from becoming another error while torch compiles."""

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["keeping_interrupt"]


@contextmanager
def keeping_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt if torch raises another error while it cleans up after one.

    Ctrl-C between two statements of torch, such as entering and recording a dispatch mode, makes its cleanup fail:
    "trying to pop from empty mode stack".
    """
    try:
        yield
    except Exception as error:
        if (interrupt := _interrupt_behind(error)) is None:
            raise
        raise KeyboardInterrupt(*interrupt.args) from error


def _interrupt_behind(error: BaseException) -> KeyboardInterrupt | None:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or not str(trace.tb_frame.f_globals.get("__name__")).startswith("torch."):
        return None  # raised deliberately by user code
    behind = error.__context__
    while behind is not None and not isinstance(behind, KeyboardInterrupt):
        behind = behind.__context__
    return behind
