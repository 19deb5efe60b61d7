"""An interrupt that comes while torch compiles, and what torch makes of it."""

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["keeping_interrupt"]


@contextmanager
def keeping_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt where torch raises another error while it cleans up after one.

    Ctrl-C between two lines of torch that belong together, such as entering and noting a dispatch mode, makes its
    cleanup fail: "trying to pop from empty mode stack".
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
        return None  # raised by the user's code, which knows what it does
    behind = error.__context__
    while behind is not None and not isinstance(behind, KeyboardInterrupt):
        behind = behind.__context__
    return behind
