"""AdamW with weight decay for matrices only, Muon, and learning-rate schedules by optimizer step."""

import math
from collections.abc import Iterable
from functools import partial
from typing import Literal, get_args

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from typing_extensions import override

from lightning_ups.optim.muon import MuonWithAdamW
from lightning_ups.order.arguments import check_choice

Schedule = Literal["cosine", "wsd", "constant"]
_FUSED_DEVICES = ("cpu", "cuda")


def decay_groups(parameters: Iterable[nn.Parameter], *, weight_decay: float) -> list[dict[str, object]]:
    """Return the trainable ``parameters`` as optimizer groups: only matrices decay, not gains, biases and scalars."""
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    groups: list[dict[str, object]] = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def adamw(
    module: nn.Module, *, lr: float, betas: tuple[float, float], weight_decay: float, fused: bool | None = None
) -> torch.optim.AdamW:
    """Return AdamW over the trainable parameters of ``module``.

    Args:
        module: The module.
        lr: The peak learning rate.
        betas: Decay of the averages of gradient and squared gradient.
        weight_decay: Of matrices; see `decay_groups`.
        fused: Use torch's fused AdamW. None: on CPU and CUDA.
    """
    groups = decay_groups(module.parameters(), weight_decay=weight_decay)
    return torch.optim.AdamW(groups, lr=lr, betas=betas, fused=_can_fuse(module) if fused is None else fused)


def muon(
    module: nn.Module,
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
    fused: bool | None = None,
    outer: Iterable[nn.Module] = (),
) -> MuonWithAdamW:
    """Return Muon over the trainable matrices of ``module``, with AdamW over its other parameters.

    Args:
        module: The module.
        lr: The peak learning rate of both.
        betas: Of AdamW.
        weight_decay: As of `adamw`.
        fused: As of `adamw`.
        outer: Layers at the beginning and the end, whose matrices AdamW trains: Muon is for hidden layers.
    """
    kept = {id(parameter) for layer in outer for parameter in layer.parameters()}
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trainable if parameter.ndim == 2 and id(parameter) not in kept]
    chosen = {id(parameter) for parameter in matrices}
    others = decay_groups((p for p in trainable if id(p) not in chosen), weight_decay=weight_decay)
    fused = _can_fuse(module) if fused is None else fused
    return MuonWithAdamW(matrices, others, lr=lr, weight_decay=weight_decay, betas=betas, fused=fused)


def _can_fuse(module: nn.Module) -> bool:
    return all(parameter.device.type in _FUSED_DEVICES for parameter in module.parameters())


def scheduler(
    optimizer: Optimizer,
    *,
    schedule: Schedule,
    warmup_steps: int,
    total_steps: float,
    final_fraction: float,
    decay_fraction: float,
) -> LambdaLR:
    """Return a scheduler that multiplies the optimizer's learning rates by `factor` at each step.

    Raises:
        ValueError: If the schedule needs an end and the run has none.
    """
    if schedule != "constant" and not 0 < total_steps < math.inf:
        raise ValueError(
            f"schedule={schedule!r} needs the number of steps, since it decays until the last one, and this run has no"
            " end."
            " Set max_steps or max_epochs of the Trainer, or use schedule='constant'."
        )
    rule = partial(
        factor,
        schedule=schedule,
        warmup_steps=warmup_steps,
        total_steps=total_steps,
        final_fraction=final_fraction,
        decay_fraction=decay_fraction,
    )
    return LambdaLR(optimizer, rule)


def factor(
    step: int,
    *,
    schedule: Schedule,
    warmup_steps: int,
    total_steps: float,
    final_fraction: float,
    decay_fraction: float,
) -> float:
    """Return the factor of the peak learning rate at ``step``, counted from zero.

    Linear from ``1 / warmup_steps`` up to 1 over the warm-up. Then ``cosine`` falls to ``final_fraction`` at the last
    step; ``wsd`` (warm-up, stable, decay) stays at 1 and falls linearly over the last ``decay_fraction`` of the
    steps; ``constant`` stays.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    start = warmup_steps if schedule == "cosine" else max(warmup_steps, total_steps * (1 - decay_fraction))
    done = min(max((step - start) / max(total_steps - start, 1), 0.0), 1.0)
    fallen = (1 - math.cos(math.pi * done)) / 2 if schedule == "cosine" else done
    return 1 - (1 - final_fraction) * fallen


class ScheduledAdamW(LightningModule):
    """A module that trains with `adamw` and `scheduler`. Its constructor calls `keep_settings`."""

    lr: float
    betas: tuple[float, float]
    weight_decay: float
    fused: bool | None
    schedule: Schedule
    warmup_steps: int
    final_fraction: float
    decay_fraction: float

    def keep_settings(
        self,
        *,
        of: str,
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
        schedule: Schedule,
        warmup_steps: int,
        final_fraction: float,
        decay_fraction: float,
        fused: bool | None,
    ) -> None:
        """Store the arguments of `adamw` and `scheduler`.

        Raises:
            ValueError: If the schedule of the class ``of`` is unknown.
        """
        why = "It is how the learning rate decays after the warm-up."
        check_choice("schedule", schedule, get_args(Schedule), of=of, why=why)
        self.lr, self.betas, self.weight_decay, self.fused = lr, betas, weight_decay, fused
        self.schedule, self.warmup_steps = schedule, warmup_steps
        self.final_fraction, self.decay_fraction = final_fraction, decay_fraction

    def make_optimizer(self) -> Optimizer:
        """Return the optimizer without its schedule."""
        return adamw(self, lr=self.lr, betas=self.betas, weight_decay=self.weight_decay, fused=self.fused)

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = self.make_optimizer()
        steps = scheduler(
            optimizer,
            schedule=self.schedule,
            warmup_steps=self.warmup_steps,
            total_steps=self.trainer.estimated_stepping_batches,
            final_fraction=self.final_fraction,
            decay_fraction=self.decay_fraction,
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": steps, "interval": "step"}}
