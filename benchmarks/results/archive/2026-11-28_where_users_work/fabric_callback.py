import torch
from lightning.fabric import Fabric
from torch import nn

from lightning_ups.callbacks import Compile

fabric = Fabric(accelerator="cpu", callbacks=[Compile()])
model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4)))
module, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
fabric.backward(module(torch.randn(8, 16)).square().mean())
optimizer.step()
print("compiled graphs:", torch._dynamo.utils.counters["stats"]["unique_graphs"])  # noqa: TID251
