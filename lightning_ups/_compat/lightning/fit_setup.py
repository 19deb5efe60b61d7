"""Imitates the beginning of a fit for code that inspects a run before it: data, optimizers, the first batch."""

import random
from collections.abc import Sequence
from itertools import islice
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.core.optimizer import _configure_optimizers
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.seed import isolate_rng
from torch.optim import Optimizer
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, IterableDataset


def optimizers_of(configured: Any) -> tuple[Sequence[Optimizer], Sequence[Any]]:
    """Return the optimizers and schedulers in any return value of ``configure_optimizers``."""
    optimizers, schedulers, _ = _configure_optimizers(configured or [])
    return optimizers, schedulers


def first_batch(trainer: Trainer) -> Any:
    """Return a batch as training will see it, without using the run's samplers, workers or random numbers.

    Raises:
        ValueError: If there is no data for training.
    """
    source = trainer.fit_loop._data_source
    if not source.is_defined():
        raise ValueError(
            "There is no training data, and the shapes of a run come from its first batch."
            " Give fit a DataLoader, or a LightningDataModule with train_dataloader."
        )
    state = random.getstate()
    try:
        with isolate_rng():
            loaders = source.dataloader()
            loaders = loaders.iterables if isinstance(loaders, CombinedLoader) else loaders
            return tree_map(_batch_of, loaders, is_leaf=_is_loader)
    finally:
        random.setstate(state)


def _is_loader(loaders: Any) -> bool:
    return isinstance(loaders, DataLoader) or not isinstance(loaders, dict | list | tuple) or _holds_batches(loaders)


def _holds_batches(loaders: Any) -> bool:
    # A list of batches is one loader, not a list of loaders.
    inner = [*(loaders.values() if isinstance(loaders, dict) else loaders)]
    return not any(isinstance(each, DataLoader) for each in inner)


def _batch_of(loader: Any) -> Any:
    if not isinstance(loader, DataLoader):
        return next(iter(loader))
    dataset, size = loader.dataset, _batch_size(loader)
    if isinstance(dataset, IterableDataset):
        samples = [*islice(iter(dataset), size or 1)]
    else:
        indices = [*range(min(size or 1, len(dataset)))]  # type: ignore[arg-type]
        several = getattr(dataset, "__getitems__", None)
        samples = several(indices) if size and several is not None else [dataset[i] for i in indices]
    return loader.collate_fn(samples if size else samples[0])


def _batch_size(loader: DataLoader[Any]) -> int | None:
    if loader.batch_size is not None:
        return loader.batch_size
    own = getattr(loader.batch_sampler, "batch_size", None)
    return own if isinstance(own, int) else (len(next(iter(loader.batch_sampler))) if loader.batch_sampler else None)


def attach(trainer: Trainer, module: LightningModule, data: LightningDataModule | None) -> None:
    """Attach ``module`` and its data to ``trainer``, as the beginning of fit does."""
    trainer.strategy._lightning_module = module
    module.trainer = trainer
    trainer._data_connector.attach_data(module, datamodule=data)
    if data is not None:
        data.prepare_data()
        data.setup("fit")
