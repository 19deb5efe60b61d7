"""Physics: a surrogate of the heat equation, with its spectral part in float32. `python examples/physics.py`."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ups import BF16Precision, StepGuard


class Spectral(nn.Module):
    """Multiply the lowest Fourier modes by learned numbers."""

    def __init__(self, channels: int, modes: int = 12):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(channels, channels, modes, 2) / channels)

    def forward(self, u):
        modes = torch.fft.rfft(u)[..., : self.weight.shape[2]]
        mixed = torch.einsum("bim,iom->bom", modes, torch.view_as_complex(self.weight))
        return torch.fft.irfft(mixed, n=u.shape[-1])


class Surrogate(L.LightningModule):
    """Predict a temperature profile one time step later."""

    def __init__(self, channels: int = 32):
        super().__init__()
        self.lift, self.spectral = nn.Conv1d(1, channels, 1), Spectral(channels)
        self.mix, self.project = nn.Conv1d(channels, channels, 1), nn.Conv1d(channels, 1, 1)

    def training_step(self, batch, batch_idx):
        before, after = batch
        hidden = self.lift(before)
        change = self.project(nn.functional.gelu(self.spectral(hidden) + self.mix(hidden)))
        loss = nn.functional.mse_loss(before + change, after) / nn.functional.mse_loss(before, after)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def heat(count: int = 1024, points: int = 64) -> TensorDataset:
    """Return random periodic profiles, and what heat conduction makes of them."""
    frequencies = torch.arange(points // 2 + 1)
    modes = torch.randn(count, 1, points // 2 + 1, dtype=torch.cfloat) * (frequencies < 8) * points / 4
    return TensorDataset(
        torch.fft.irfft(modes, n=points), torch.fft.irfft(modes * torch.exp(-0.05 * frequencies**2), n=points)
    )


L.seed_everything(0)
precision = BF16Precision(in_float32=["spectral"])
trainer = L.Trainer(max_steps=200, max_epochs=-1, plugins=[precision], callbacks=[StepGuard()])
trainer.fit(Surrogate(), DataLoader(heat(), batch_size=64, shuffle=True))
print(f"error: {trainer.callback_metrics['loss']:.4f} of that of no change")
