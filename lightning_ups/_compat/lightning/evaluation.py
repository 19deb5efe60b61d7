"""Lightning's private ways of evaluating and of moving a module, where sharding needs others."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.pytorch import LightningModule, Trainer
from torch import nn

__all__ = ["keeping_attributes", "move_all_but_parameters", "tied_recurrent", "without_inference_mode"]


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


def tied_recurrent(module: nn.Module) -> bool:
    """Return whether two recurrent layers in ``module`` share a weight.

    Each keeps weak references to its weights, with which ``Module.to`` cannot move sharded ones of the other.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, nn.RNNBase)]
    weights = [id(p) for layer in layers for p in dict.fromkeys(layer.parameters(recurse=False))]
    return len(weights) > len(set(weights))
