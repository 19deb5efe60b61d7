"""Adapts how Lightning evaluates, moves, averages, unfreezes and logs parameters to sharded ones."""

import atexit
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, wraps
from types import SimpleNamespace
from typing import Any

import torch
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.fabric.utilities.distributed import _destroy_dist_connection
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.trainer.connectors import accelerator_connector
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from lightning_ups._compat.patches import applied
from lightning_ups._compat.torch.tensors.tensors import whole_of


def is_interactive() -> bool:
    """Return whether Lightning takes this process for a notebook or an interactive shell."""
    return accelerator_connector._IS_INTERACTIVE


@cache  # once per process
def destroy_at_exit() -> None:
    """Close the process groups when the process ends; Lightning only does so if NCCL is the only backend."""
    atexit.register(_destroy_dist_connection)


@contextmanager
def without_inference_mode(trainer: Trainer) -> Iterator[None]:
    """Evaluate under ``no_grad`` while the context is open.

    Under ``inference_mode`` FSDP2 would permanently make its buffers for gathered parameters inference tensors, to
    which the next fit could not write.
    """
    loops = (trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
    before = [loop.inference_mode for loop in loops]
    for loop in loops:
        loop.inference_mode = False
    try:
        yield
    finally:
        for loop, mode in zip(loops, before, strict=True):
            loop.inference_mode = mode


def move_all_but_parameters(module: LightningModule, device: torch.device) -> None:
    """Move metrics and other modules without parameters to ``device``, and set ``module.device``."""
    for child in module.modules():
        if next(child.parameters(), None) is None:
            child.to(device)
    _update_properties(module, device=device)


@contextmanager
def keeping_attributes(module: nn.Module) -> Iterator[None]:
    """Keep attributes that the user set on parameters: ``Module.to`` drops those of sharded ones."""
    before = {name: dict(vars(p)) for name, p in module.named_parameters()}
    yield
    for name, p in module.named_parameters():
        vars(p).update({key: value for key, value in before[name].items() if key not in vars(p)})


def has_weak_references(module: nn.Module) -> bool:
    """Return whether there are weak references to sharded parameters of ``module``, for which ``Module.to`` raises.

    Since torch 2.14, Dynamo keeps such references of a compiled module. So does a recurrent layer, which renews its own
    in ``Module.to``, but not those of another layer that shares a weight.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, nn.RNNBase)]
    held = Counter(id(p) for layer in layers for p in dict.fromkeys(layer.parameters(recurse=False)))
    shards = [p for p in module.parameters() if isinstance(p, DTensor)]
    return any(held[id(p)] > 1 or weakref.getweakrefcount(p) > held[id(p)] for p in shards)


def finetuning_by_identity() -> AbstractContextManager[None]:
    """Let callbacks that unfreeze parameters compare them by identity while the context is open.

    Lightning compares values, which fails if one parameter is sharded and the other is not, and which may differ
    between ranks for shards: an empty shard equals every other.
    """
    return applied("lightning.pytorch.callbacks:BaseFinetuning.filter_on_optimizer", lambda _: _not_held, once=True)


def regroups(trainer: Any) -> bool:
    """Return whether a callback of ``trainer`` may have added parameter groups to optimizers."""
    return any(isinstance(callback, BaseFinetuning) for callback in trainer.callbacks)


def regroup(trainer: Any) -> None:
    """Restore the parameter groups that optimizers had when the state of such callbacks was saved.

    Lightning does so in `on_fit_start`, which is too early for a strategy that restores after setup.
    """
    for callback in trainer.callbacks:
        if isinstance(callback, BaseFinetuning):
            BaseFinetuning.on_fit_start(callback, trainer, trainer.lightning_module)


def _not_held(optimizer: Optimizer, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return [p for p in params if id(p) not in held]


def averaged_copies(callbacks: Iterable[Callback]) -> list[nn.Module]:
    """Return the copies of the module that averaging callbacks made in their ``setup``."""
    copies: list[nn.Module] = []
    for callback in callbacks:
        if isinstance(callback, (WeightAveraging, StochasticWeightAveraging)):
            copy = getattr(callback, "_average_model", None)
            if copy is not None:
                copies.append(copy.module if isinstance(copy, AveragedModel) else copy)
    return copies


@contextmanager
def taken_whole() -> Iterator[None]:
    """Gather sharded values that Lightning logs while the context is open.

    `LightningModule.log` would keep a ``DTensor``, which `EarlyStopping` cannot print and a checkpoint cannot store,
    and `lightning.pytorch.utilities.grad_norm` combines all norms in one tensor, which torch cannot do with DTensors.
    """
    with (
        applied("lightning.pytorch:LightningModule._LightningModule__to_tensor", _logging),
        applied("lightning.pytorch.utilities.grads:torch", lambda _: _Torch()),
    ):
        yield


def _logging(stock: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(stock)
    def to_tensor(self: LightningModule, value: Any, *rest: Any) -> Any:
        return stock(self, whole_of(value.detach()) if isinstance(value, DTensor) else value, *rest)

    return to_tensor


class _Torch(SimpleNamespace):
    """Torch, as seen by a module of Lightning."""

    def tensor(self, values: Sequence[Any], **options: Any) -> Tensor:
        return torch.tensor([whole_of(v) if isinstance(v, DTensor) else v for v in values], **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)
