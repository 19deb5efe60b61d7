"""Private parts of Lightning's fit loop that move a batch to the device."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_ups._compat.patches import applied

_BEFORE = ("on_before_batch_transfer", "transfer_batch_to_device")


def around_transfer(trainer: Any, context: Callable[[], AbstractContextManager[Any]]) -> Callable[[], None]:
    """Move every training batch within ``context()``; the hook after the transfer is outside of it.

    If a strategy or module has its own transfer code, all of it runs within ``context()``.

    Returns:
        A function that undoes it.
    """
    strategy, undo = trainer.strategy, ExitStack()
    is_replaced = "batch_to_device" in vars(strategy)

    def moving(stock: Callable[..., Any]) -> Callable[..., Any]:
        def batch_to_device(batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
            if not trainer.training:
                return stock(batch, device, dataloader_idx)
            module = strategy.lightning_module
            if is_replaced or not _is_stock(strategy, module):
                with context():
                    return stock(batch, device, dataloader_idx)
            device = device or strategy.root_device
            with context():
                batch = module._call_batch_hook("transfer_batch_to_device", batch, device, dataloader_idx)
            return module._call_batch_hook("on_after_batch_transfer", batch, dataloader_idx)

        return batch_to_device

    undo.enter_context(applied("lightning.pytorch.strategies:Strategy.batch_to_device", moving, owner=strategy))
    return undo.close


def _is_stock(strategy: Any, module: Any) -> bool:
    return (
        type(strategy).batch_to_device is Strategy.batch_to_device
        and type(module)._apply_batch_transfer_handler is LightningModule._apply_batch_transfer_handler
    )


def loop_moves(trainer: Any) -> bool:
    """Return whether the loop moves batches; a ``training_step(self, dataloader_iter)`` does it itself."""
    return not isinstance(trainer.fit_loop._data_fetcher, _DataLoaderIterDataFetcher)


def own_hooks(trainer: Any) -> list[str]:
    """Return the user's hooks that see or move a batch before it is on the device, as ``Class.hook``."""
    found = []
    for hook in _BEFORE:
        for owner, kind in ((trainer.datamodule, LightningDataModule), (trainer.lightning_module, LightningModule)):
            if owner is not None and is_overridden(hook, owner, parent=kind):
                found.append(f"{type(owner).__name__}.{hook}")
    return found


def training_iterators(trainer: Any) -> list[tuple[Any, Any]]:
    """Return the training loaders and their iterators in this epoch; empty between two epochs."""
    combined = trainer.fit_loop._combined_loader
    iterator = getattr(combined, "_iterator", None)
    if iterator is None:
        return []
    return list(zip(combined.flattened, iterator.iterators, strict=False))


def batches_ahead(trainer: Any) -> list[Any]:
    """Return batches that the loop has read but not used yet, as it does if the length is unknown."""
    fetcher = trainer.fit_loop._data_fetcher
    return [batch for batch, *_ in getattr(fetcher, "batches", [])]


def epoch_goes_on(trainer: Any) -> bool:
    """Return whether the loop knows that another batch follows the current one."""
    fetcher = trainer.fit_loop._data_fetcher
    if fetcher is None or fetcher.length is None or fetcher.fetched >= fetcher.length:
        return False
    if trainer.max_steps == -1 or trainer.fit_loop._should_accumulate():
        return True
    return trainer.global_step + len(trainer.optimizers) < trainer.max_steps
