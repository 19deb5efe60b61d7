"""Taking a batch from the workers of a DataLoader before it is asked for, so that nobody can tell.

Nothing of it is public in torch. What is read ahead waits below the iterator that Lightning reads: positions, counts,
ends and errors come to pass when the batch is asked for, and not before.
"""

import weakref
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, RandomSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind, _MultiProcessingDataLoaderIter

from lightning_ups._compat import patches

__all__ = ["read_ahead", "why_not"]

_NEXT = "torch.utils.data.dataloader:_MultiProcessingDataLoaderIter._next_data"
_RESET = "torch.utils.data.dataloader:_MultiProcessingDataLoaderIter._reset"
_LIBRARIES = ("torch.utils.data.", "lightning.")


def why_not(loader: Any, iterator: Any) -> str | None:
    """Return why a batch of ``loader`` must be read where it is asked for, or None.

    Reading ahead is the same only where it draws no random number of this process, and shows training nothing: where
    workers read, which are ahead of training anyway, and the order of samples is settled when an epoch begins.
    """
    name, iterator = type(loader).__name__, _innermost(iterator)
    if not isinstance(iterator, _BaseDataLoaderIter):
        return f"{name} reads in a way of its own"
    if loader.num_workers == 0:
        return f"{name} reads in this process (num_workers=0)"
    if type(iterator) is not _MultiProcessingDataLoaderIter:
        return f"{name} reads in a way of its own"
    if (missing := patches.why_not(_NEXT) or patches.why_not(_RESET)) is not None:
        return missing
    if iterator._dataset_kind != _DatasetKind.Iterable and not _is_settled(loader):
        return f"the sampler of {name} may draw random numbers as it goes"
    return None


def read_ahead(iterator: Any) -> Any:
    """Return the batch that ``iterator`` will give next, or None if it will give an end or an error.

    Args:
        iterator: One for which `why_not` has no reason.
    """
    iterator = _innermost(iterator)
    ahead = vars(iterator).get("_next_data")
    if ahead is None:
        ahead = _Ahead(iterator)
        patches.installed(_NEXT, iterator, lambda _: ahead)
        patches.installed(_RESET, iterator, lambda _: ahead.reset)  # persistent workers begin another epoch by it
    return ahead.read()


class _Ahead:
    """Stands for the method that waits for a worker's batch."""

    def __init__(self, iterator: Any) -> None:
        # Weak: an iterator stops its workers when its last reference goes, and not when garbage is collected.
        self._iterator = weakref.ref(iterator)
        self._waits, self._batch = False, None
        self._error: Exception | None = None

    def read(self) -> Any:
        if not self._waits:
            try:
                self._batch = self._stock()
            except Exception as error:  # noqa: BLE001  (raised where the batch is asked for)
                # Its frames hold the iterator, which would not go before garbage is collected.
                self._error = error.with_traceback(None)
            self._waits = True
        return self._batch

    def __call__(self) -> Any:
        if not self._waits:
            return self._stock()
        batch, error = self._batch, self._error
        self._forget()
        try:
            if error is not None:
                raise error
        finally:
            del error  # which would hold this frame, and this frame it
        return batch

    def reset(self, *args: Any, **kwargs: Any) -> Any:
        self._forget()
        iterator = self._iterator()
        return type(iterator)._reset(iterator, *args, **kwargs)  # type: ignore[union-attr]

    def _stock(self) -> Any:
        iterator = self._iterator()
        return type(iterator)._next_data(iterator)  # type: ignore[union-attr]

    def _forget(self) -> None:
        self._waits, self._batch, self._error = False, None, None


def _innermost(iterator: Any) -> Any:
    # An iterator that is followed for an exact resume names the one that it stands for.
    while not isinstance(iterator, _BaseDataLoaderIter) and (inner := getattr(iterator, "inner", None)) is not None:
        iterator = inner
    return iterator


def _is_settled(loader: DataLoader[Any]) -> bool:
    if loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler:
        return False
    sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler.sampler
    if not type(sampler).__module__.startswith(_LIBRARIES):
        return False
    # It draws again and again from a generator of the user's; one that it makes itself nobody else sees.
    own = isinstance(sampler, RandomSampler) and sampler.generator is not None
    return not own or not (sampler.replacement or sampler.num_samples > len(sampler.data_source))
