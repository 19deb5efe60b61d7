"""A GAN with manual optimization: both networks are compiled. `python examples/gan.py` needs no download."""

from itertools import pairwise

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_ups import BF16Precision, Compile


def mlp(*sizes: int) -> nn.Sequential:
    """Return linear layers with a nonlinearity between them."""
    layers = [layer for i, o in pairwise(sizes) for layer in (nn.Linear(i, o), nn.LeakyReLU(0.2))]
    return nn.Sequential(*layers[:-1])


class GAN(L.LightningModule):
    """Learn to draw points of a ring."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = mlp(16, 128, 128, 2), mlp(2, 128, 128, 1)

    def training_step(self, batch, batch_idx):
        generate, judge = self.optimizers()
        made = self.generator(torch.randn(len(batch), 16, device=self.device))
        softplus = nn.functional.softplus
        loss = softplus(-self.critic(batch)).mean() + softplus(self.critic(made.detach())).mean()
        judge.zero_grad()
        self.manual_backward(loss)
        judge.step()
        fooled = softplus(-self.critic(made)).mean()
        generate.zero_grad()
        self.manual_backward(fooled)
        generate.step()
        self.log_dict({"critic": loss, "generator": fooled, "radius": made.norm(dim=1).mean()})

    def configure_optimizers(self):
        return [torch.optim.Adam(net.parameters(), lr=5e-4, betas=(0.5, 0.99)) for net in (self.generator, self.critic)]


L.seed_everything(0)
angles = 6.2832 * torch.rand(4096)
ring = torch.stack([angles.cos(), angles.sin()], dim=1) + 0.05 * torch.randn(4096, 2)
trainer = L.Trainer(max_steps=800, max_epochs=-1, plugins=[BF16Precision()], callbacks=[Compile(scope="model")])
trainer.fit(GAN(), DataLoader(ring, batch_size=256, shuffle=True))
print(f"mean radius: {trainer.callback_metrics['radius']:.2f}, of the ring: 1.00")
