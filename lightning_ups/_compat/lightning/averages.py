"""The copies of the model that callbacks of Lightning average weights in."""

from collections.abc import Iterable

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import nn
from torch.optim.swa_utils import AveragedModel

__all__ = ["averaged_copies"]


def averaged_copies(callbacks: Iterable[Callback]) -> list[nn.Module]:
    """Return the copies of the module that averaging callbacks made in their ``setup``."""
    copies: list[nn.Module] = []
    for callback in callbacks:
        if isinstance(callback, (WeightAveraging, StochasticWeightAveraging)):
            copy = getattr(callback, "_average_model", None)
            if copy is not None:
                copies.append(copy.module if isinstance(copy, AveragedModel) else copy)
    return copies
