"""Muon for matrices and AdamW for the rest, as one optimizer."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import AdamW, Muon
from typing_extensions import override

from lightning_ups.optim.delegating import DelegatingOptimizer


class MuonWithAdamW(DelegatingOptimizer):
    """Step ``matrices`` with torch's Muon and ``others`` with its AdamW.

    It is one optimizer, as Lightning's automatic optimization needs. Muon's updates are scaled to the size of AdamW's,
    so that both have the same learning rate.

    Args:
        matrices: Parameters of two dimensions.
        others: Groups of the other parameters, each with its weight decay.
        lr: The learning rate.
        weight_decay: Of the matrices.
        betas: Of AdamW.
        momentum: Of Muon.
        fused: Use torch's fused AdamW.
    """

    def __init__(
        self,
        matrices: Sequence[Tensor],
        others: Sequence[dict[str, Any]],
        *,
        lr: float,
        weight_decay: float,
        betas: tuple[float, float],
        momentum: float = 0.95,
        fused: bool = False,
    ) -> None:
        muon = Muon(matrices, lr=lr, weight_decay=weight_decay, momentum=momentum, adjust_lr_fn="match_rms_adamw")
        self._steppers = (muon, AdamW(others, lr=lr, betas=betas, fused=fused))
        super().__init__([group for stepper in self._steppers for group in stepper.param_groups], {})

    @override
    def delegate_step(self, loss: float | None, *, has_closure: bool) -> None:
        for stepper in self._steppers:
            # Again in each step, since loading a checkpoint replaces both.
            stepper.state = self.state
            is_muon = isinstance(stepper, Muon)
            stepper.param_groups = [group for group in self.param_groups if ("momentum" in group) == is_muon]
            stepper.step()
