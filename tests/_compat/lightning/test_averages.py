import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from torch import nn
from torch.optim.swa_utils import AveragedModel

from lightning_ups._compat.lightning.averages import averaged_copies


def test_copies_are_found_where_there_are_any():
    ema, swa = EMAWeightAveraging(), StochasticWeightAveraging(swa_lrs=0.1)
    assert averaged_copies([ema, swa, Callback()]) == []
    model = nn.Linear(2, 2)
    ema._average_model, swa._average_model = AveragedModel(model), nn.Linear(2, 2)
    first, second = averaged_copies([ema, swa, Callback()])
    assert torch.equal(first.weight, model.weight)
    assert second is swa._average_model
