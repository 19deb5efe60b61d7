"""What stands for a thing that a step could advance and that cannot be copied: who touches it hears why."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["NotCopiedError", "Untouched", "Watch"]


class NotCopiedError(RuntimeError):
    """A step wants something of the run of which it cannot have a copy. Its text is a part of a sentence."""


class Watch:
    """Knows what a step touched that it must not, also where the step lets no error out."""

    def __init__(self) -> None:
        self._touched: NotCopiedError | None = None
        self._runs = self._over = False

    @contextmanager
    def on(self) -> Iterator[None]:
        """Run a step; raise what it touched, whatever it made of that."""
        self._runs = True
        try:
            yield
        except Exception as error:
            if self._touched is not None and error is not self._touched:
                raise self._touched from error
            raise
        finally:
            self._over = True
        if self._touched is not None:
            raise self._touched

    def touch(self, why: str) -> None:
        """Raise, unless all is over: what is thrown away then may be closed, and is not there."""
        if self._over:
            return
        error = NotCopiedError(why)
        if self._runs and self._touched is None:
            self._touched = error
        raise error


class Untouched:
    """Stands for something that cannot be copied, and raises for whoever uses it."""

    def __init__(self, watch: Watch, why: str) -> None:
        vars(self).update(_watch=watch, _why=why)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):  # a question of Python's own, which leaves it as it is
            raise AttributeError(name)
        self._use()
        return self  # where all is over

    def __setattr__(self, name: str, value: Any) -> None:
        self._use()

    def _use(self, *_: Any, **__: Any) -> Any:
        self._watch.touch(self._why)

    __call__ = __iter__ = __next__ = __len__ = __getitem__ = __setitem__ = __delitem__ = __contains__ = _use
    __enter__ = __exit__ = __bool__ = __int__ = __float__ = __index__ = __array__ = _use
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _use
