"""Placeholders for objects that a dry run cannot copy: using one raises, and names the object."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["NotCopied", "NotCopiedError", "Uses"]


class NotCopiedError(RuntimeError):
    """A step uses an object that cannot be copied. The text names the object, as a part of a sentence."""


class Uses:
    """Records whether a step used a placeholder, even if the step catches the error."""

    def __init__(self) -> None:
        self._error: NotCopiedError | None = None
        self._is_running = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Raise if the code in this context uses a placeholder."""
        self._is_running = True
        try:
            yield
        except Exception as error:
            if self._error is not None and error is not self._error:
                raise self._error from error
            raise
        finally:
            self._is_running = False
        if self._error is not None:
            raise self._error

    def note(self, what: str) -> None:
        """Raise while a step runs. Before and after it, objects are only built and closed."""
        if self._is_running:
            self._error = self._error or NotCopiedError(what)
            raise self._error


class NotCopied:
    """A placeholder for an object that cannot be copied; using it in a step raises."""

    def __init__(self, uses: Uses, what: str) -> None:
        vars(self).update(_uses=uses, _what=what)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):  # Python asks for these without using the object
            raise AttributeError(name)
        return self._use()

    def __setattr__(self, name: str, value: Any) -> None:
        self._use()

    def _use(self, *_: Any, **__: Any) -> Any:
        self._uses.note(self._what)
        return self

    __call__ = __iter__ = __next__ = __len__ = __getitem__ = __setitem__ = __delitem__ = __contains__ = _use
    __enter__ = __exit__ = __bool__ = __int__ = __float__ = __index__ = __array__ = _use
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _use
