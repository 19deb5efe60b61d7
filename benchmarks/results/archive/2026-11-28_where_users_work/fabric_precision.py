import torch
from lightning.fabric import Fabric
from torch import nn

from lightning_ups.precision import BF16Precision

fabric = Fabric(accelerator="cpu", plugins=[BF16Precision()])
model = nn.Linear(16, 1)
module, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
fabric.backward(module(torch.randn(8, 16)).square().mean())
