"""bfloat16 weights without masters, which the optimizer rounds into by chance."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ups.optim.master_weights import has_statistics
from lightning_ups.order import DtypePolicy, PolicyPrecision
from lightning_ups.transforms.blocks import roots
from lightning_ups.transforms.casting import cast_around
from lightning_ups.transforms.error_hints import advice_on_mixed_types


class BF16WeightsPrecision(PolicyPrecision):
    """Hold weights and gradients in bfloat16 alone: two bytes each, and no masters.

    A step that is smaller than what bfloat16 can tell apart, as most are, would be lost. The optimizer therefore has to
    round up or down by chance, so that steps add up on average: torchao's, with ``bf16_stochastic_round=True``.
    Parameters of modules with floating-point statistics, such as BatchNorm, stay as they are. Gradients are reduced in
    float32 under a sharding strategy. Weights stay bfloat16 after fit, and so are those in checkpoints.

    Raises:
        ValueError: When fitting starts, if an optimizer does not round so.

    Example::

        Trainer(plugins=[BF16WeightsPrecision()])
    """

    in_fabric = "Write Fabric(precision='bf16-true'), which keeps weights in bfloat16 as well."

    def __init__(self) -> None:
        super().__init__(DtypePolicy.bf16_mixed(), name="bf16-mixed")

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        if not isinstance(module, LightningModule):
            self.refuse_fabric()
        self.teardown()
        self.check_whole(module, instead="precision='bf16-mixed'")
        for inner in module.modules():
            if has_statistics(inner):
                continue
            for parameter in inner.parameters(recurse=False):
                if parameter.dtype is torch.float32:
                    parameter.data = parameter.data.to(torch.bfloat16)
        if not self._sharded:
            outermost = [root for _, root in roots(module)]
            self._undo.enter_context(cast_around(outermost, inputs=torch.bfloat16, outputs=self.policy.output))
        return module

    @override
    def connect(self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]) -> Any:
        for optimizer in optimizers:
            _check_rounds(optimizer)
        return super().connect(model, optimizers, lr_schedulers)

    @override
    def _look_at_weights(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Say nothing: weights without masters are what was asked for, and optimizers are checked."""

    @property
    @override
    def _how(self) -> str:
        return super()._how if self._sharded else "bfloat16 weights"

    @override
    def forward_context(self) -> Any:
        if self._sharded:
            return nullcontext()
        return advice_on_mixed_types("Cast them, as in x.to(self.weight.dtype), or use BF16Precision")


def _check_rounds(optimizer: Optimizer) -> None:
    low = any(p.dtype is torch.bfloat16 for group in optimizer.param_groups for p in group["params"])
    if low and not getattr(getattr(optimizer, "stepper", optimizer), "bf16_stochastic_round", False):
        raise ValueError(
            f"{type(optimizer).__name__} steps bfloat16 weights, and rounds to the nearest: most steps would be lost."
            " Use torchao.optim.AdamW8bit(..., bf16_stochastic_round=True) or another of its kind, or BF16Precision()."
        )
