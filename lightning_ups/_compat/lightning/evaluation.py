"""Lightning's private ways of evaluating and of moving a module, where sharding needs others."""

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.distributed.tensor import DTensor

__all__ = ["has_weak_references", "keeping_attributes", "move_all_but_parameters", "without_inference_mode"]


@contextmanager
def without_inference_mode(trainer: Trainer) -> Iterator[None]:
    """Evaluate under ``no_grad`` while the context is open.

    Under ``inference_mode`` FSDP2 would make its buffers for gathered parameters inference tensors, for good, and the
    next fit could not write to them.
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
    """Move metrics and whatever else holds no parameters to ``device``, and let ``module.device`` be it."""
    for child in module.modules():
        if next(child.parameters(), None) is None:
            child.to(device)
    _update_properties(module, device=device)


@contextmanager
def keeping_attributes(module: nn.Module) -> Iterator[None]:
    """Let parameters keep the attributes that the user gave them: ``Module.to`` swaps those of sharded ones away."""
    before = {name: dict(vars(p)) for name, p in module.named_parameters()}
    yield
    for name, p in module.named_parameters():
        vars(p).update({key: value for key, value in before[name].items() if key not in vars(p)})


def has_weak_references(module: nn.Module) -> bool:
    """Return whether anything keeps weak references to sharded parameters of ``module``, which ``Module.to`` refuses.

    Dynamo does since torch 2.14 once the module was compiled. So does a recurrent layer, which renews its own in
    ``Module.to`` but not those of another layer that shares a weight.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, nn.RNNBase)]
    held = Counter(id(p) for layer in layers for p in dict.fromkeys(layer.parameters(recurse=False)))
    shards = [p for p in module.parameters() if isinstance(p, DTensor)]
    return any(held[id(p)] > 1 or weakref.getweakrefcount(p) > held[id(p)] for p in shards)
