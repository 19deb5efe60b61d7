"""A training step on tensors with shapes and without values, and the first batch of a run that has not begun."""

import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from itertools import islice
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.core.optimizer import _configure_optimizers
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.seed import isolate_rng
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from lightning_ups._compat.torch.log_levels import only_from

__all__ = ["attach", "fake_step", "fake_twin", "first_batch"]


@contextmanager
def fake_twin(module: LightningModule) -> Iterator[LightningModule]:
    """Give a copy of ``module`` whose tensors have no values, and let operators compute nothing, as long as it is open.

    Raises:
        ValueError: If it cannot be copied.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    tensors = [*module.parameters(), *module.buffers()]
    known: dict[int, Any] = {id(tensor): mode.from_tensor(tensor) for tensor in tensors}
    try:
        twin = deepcopy(module, known)
    except (TypeError, RuntimeError, AttributeError) as error:
        raise ValueError(_refusal(module, error)) from error
    twin._trainer = module._trainer  # which a copy leaves behind
    vars(twin).update(dict.fromkeys(("log", "log_dict"), _nothing))
    _let_write_nowhere(twin)
    with mode:
        yield twin


class _Unregistered(nn.Module):
    """Comes before a class whose subclasses are registered as they are made, and leaves that out."""

    @override
    def __init_subclass__(cls) -> None:
        pass


def _let_write_nowhere(twin: LightningModule) -> None:
    """Give ``twin`` loggers that keep nothing, as if there were none of the run's; they are properties of its class."""
    nowhere, kind = DummyLogger(), type(twin)
    shown = {"logger": property(lambda _: nowhere), "loggers": property(lambda _: [nowhere])}
    twin.__class__ = type(kind.__name__, (_Unregistered, kind), {"__module__": kind.__module__, **shown})


def _nothing(*_: Any, **__: Any) -> None:
    """Log nothing."""


def fake_step(twin: LightningModule, batch: Any) -> None:
    """Call the ``training_step`` of a fake twin, with ``batch``.

    Raises:
        ValueError: If it cannot run so, since it looks at values, or needs what fit prepares.
    """
    parameter = next(twin.parameters(), None)
    device = parameter.device if parameter is not None else torch.device("cpu")
    batch = tree_map(lambda leaf: _fake(leaf, device) if isinstance(leaf, torch.Tensor) else leaf, batch)
    indexed = is_param_in_hook_signature(twin.training_step, "batch_idx", min_args=2)
    try:
        if not twin.automatic_optimization:
            _let_step(twin)
        with only_from(logging.CRITICAL, "torch._subclasses.fake_tensor"):  # it logs what it raises
            twin.training_step(batch, *((0,) if indexed else ()))
    except (RuntimeError, TypeError, ValueError, AttributeError, AssertionError, MisconfigurationException) as error:
        raise ValueError(_refusal(twin, error)) from error


def _let_step(twin: LightningModule) -> None:
    """Give ``twin`` what manual optimization asks for: optimizers of its own, which step nothing."""
    optimizers, schedulers, _ = _configure_optimizers(twin.configure_optimizers() or [])  # type: ignore[arg-type]
    for optimizer in optimizers:
        for name in ("toggle_model", "sync_gradients"):  # which Lightning adds
            vars(optimizer)[name] = lambda *_, **__: nullcontext()
    plain = [each["scheduler"] if isinstance(each, dict) else each for each in schedulers]
    names = ("manual_backward", "clip_gradients", "toggle_optimizer", "untoggle_optimizer")
    vars(twin).update(
        dict.fromkeys(names, _nothing),
        optimizers=lambda *_, **__: optimizers[0] if len(optimizers) == 1 else optimizers,
        lr_schedulers=lambda: plain[0] if len(plain) == 1 else plain or None,
    )


def _fake(leaf: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_like(leaf, device=device)  # fake, since a mode is open


def _refusal(module: LightningModule, error: Exception) -> str:
    reason = (str(error) or repr(error)).splitlines()[0].rstrip(".")
    return (
        f"{type(module).__name__}.training_step could not run without values: {reason}."
        " It looks at what a tensor holds, or at something that is there only within fit, or it fails there as well."
        " Mend it if fit says the same. Else say how many rows its linear layers get: tokens=..., mostly batch size"
        " times sequence length."
    )


def first_batch(trainer: Trainer) -> Any:
    """Return a batch as training will see it; no sampler, worker or random number of the run is touched.

    Raises:
        ValueError: If there is no data for training.
    """
    source = trainer.fit_loop._data_source
    if not source.is_defined():
        raise ValueError(
            "There is no data for training to look at."
            " The shapes of a run come from one of its batches."
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
    # A list of batches is a loader too, and not a list of loaders.
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
    """Let ``trainer`` know ``module`` and its data, as the beginning of fit does."""
    trainer.strategy._lightning_module = module
    module.trainer = trainer
    trainer._data_connector.attach_data(module, datamodule=data)
    if data is not None:
        data.prepare_data()
        data.setup("fit")
