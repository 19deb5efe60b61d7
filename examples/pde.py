"""A transformer that forecasts turbulence, written as research code is: nothing in this file knows of lightning_ups.

The equation is that of an incompressible fluid on a torus in two dimensions, by its vorticity, stirred at one
wavelength, with a viscosity of its own for each trajectory. A spectral solver makes the data when the run begins. The
model is U-shaped: attention in shifted windows, on two resolutions, told the viscosity by scales and shifts.
"""

import math
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset


class Flow:
    """A spectral solver of the vorticity equation on [0, 2 pi) x [0, 2 pi).

    Args:
        viscosity: Of each trajectory [batch].
        points: Of the grid along each side.
        dt: A time step, which is to be small beside what the flow takes from point to point.
    """

    def __init__(self, viscosity: Tensor, *, points: int, dt: float = 0.02) -> None:
        k = torch.fft.fftfreq(points, 1 / points)
        self._kx, self._ky = k[:, None], k[None, : points // 2 + 1].abs()
        self._square = self._kx**2 + self._ky**2
        self._kept = (self._kx.abs() < points / 3) & (self._ky < points / 3)  # products alias beyond
        self._decay = torch.exp(-viscosity[:, None, None] * self._square * dt)
        self._size, self._dt = (points, points), dt
        y = torch.arange(points) * (2 * math.pi / points)
        self._force = torch.fft.rfft2(2 * torch.cos(4 * y).expand(points, points))

    def begin(self, batch: int, *, random: torch.Generator) -> Tensor:
        """Return smooth random vorticity [batch, points, points]."""
        noise = torch.fft.rfft2(torch.randn(batch, *self._size, generator=random))
        noise *= self._kept * self._square / (1 + self._square / 16) ** 3
        field = torch.fft.irfft2(noise, self._size)
        return 4 * field / field.std(dim=(1, 2), keepdim=True)

    def advance(self, vorticity: Tensor, *, steps: int) -> Tensor:
        """Return the vorticity after so many time steps of Heun's method; viscosity decays exactly."""
        w = torch.fft.rfft2(vorticity)
        for _ in range(steps):
            now = self._change(w)
            w = self._decay * (w + self._dt / 2 * now) + self._dt / 2 * self._change(self._decay * (w + self._dt * now))
        return torch.fft.irfft2(w, self._size)

    def _change(self, w: Tensor) -> Tensor:
        """Return what stirring does, and what the flow carries along; friction of the ground slows large whirls."""
        stream = w / self._square.clamp(min=1)
        u, v, dx, dy = torch.fft.irfft2(
            torch.stack([1j * self._ky * stream, -1j * self._kx * stream, 1j * self._kx * w, 1j * self._ky * w]),
            self._size,
        )
        return self._kept * (self._force - torch.fft.rfft2(u * dx + v * dy)) - 0.1 * w


class VorticityData(LightningDataModule):
    """Pairs of fields a time apart, and the viscosity: (now, viscosity, later); whole trajectories for validation.

    Args:
        points: Of the grid along each side.
        trajectories: For training; an eighth of it is for validation.
        frames: Of each trajectory, 0.2 apart.
        batch_size: Pairs of a batch.
        seed: Of the data.
    """

    def __init__(
        self, *, points: int = 32, trajectories: int = 64, frames: int = 24, batch_size: int = 16, seed: int = 0
    ) -> None:
        super().__init__()
        self.points, self.trajectories, self.frames = points, trajectories, frames
        self.batch_size, self.seed = batch_size, seed
        self._films: Tensor | None = None

    def setup(self, stage: str) -> None:
        """Solve the equation, once."""
        if self._films is not None:
            return
        random = torch.Generator().manual_seed(self.seed)
        count = self.trajectories + max(self.trajectories // 8, 1)
        self._viscosity = 10 ** torch.empty(count).uniform_(-3, -2, generator=random)
        flow = Flow(self._viscosity, points=self.points)
        field = flow.advance(flow.begin(count, random=random), steps=100)  # until it has forgotten how it began
        films = [field]
        for _ in range(self.frames - 1):
            films.append(flow.advance(films[-1], steps=10))
        films = torch.stack(films, dim=1)
        self._films = films / films[: self.trajectories].std()

    def train_dataloader(self) -> DataLoader[Any]:
        """Return pairs in random order."""
        assert self._films is not None
        films, viscosity = self._films[: self.trajectories], self._viscosity[: self.trajectories]
        pairs = TensorDataset(
            films[:, :-1].flatten(0, 1), viscosity.repeat_interleave(self.frames - 1), films[:, 1:].flatten(0, 1)
        )
        return DataLoader(pairs, batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """Return whole trajectories [batch, frames, points, points] that were never trained on."""
        assert self._films is not None
        held = TensorDataset(self._films[self.trajectories :], self._viscosity[self.trajectories :])
        return DataLoader(held, batch_size=self.batch_size)


class WindowAttention(nn.Module):
    """Attention within windows, every other time shifted by half of one: on a torus no window is cut."""

    def __init__(self, dim: int, *, heads: int, window: int, shift: int) -> None:
        super().__init__()
        self.heads, self.window, self.shift = heads, window, shift
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Return x [batch, height, width, dim], mixed within its windows."""
        batch, height, width, dim = x.shape
        w, rows, columns = self.window, height // self.window, width // self.window
        x = x.roll((-self.shift, -self.shift), dims=(1, 2))
        x = x.view(batch, rows, w, columns, w, dim).transpose(2, 3).reshape(-1, w * w, dim)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        x = x.view(batch, rows, columns, w, w, dim).transpose(2, 3).reshape(batch, height, width, dim)
        return x.roll((self.shift, self.shift), dims=(1, 2))


class Block(nn.Module):
    """Attention and a feed-forward network, scaled, shifted and gated by what the trajectory is known by."""

    def __init__(self, dim: int, *, heads: int, window: int, shifted: bool) -> None:
        super().__init__()
        self.place = nn.Conv2d(dim, dim, 3, padding=1, padding_mode="circular", groups=dim)
        self.norm = nn.LayerNorm(dim, elementwise_affine=False)
        self.attention = WindowAttention(dim, heads=heads, window=window, shift=window // 2 if shifted else 0)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.condition = nn.Linear(dim, 6 * dim)

    def forward(self, x: Tensor, known: Tensor) -> Tensor:
        """Return x [batch, height, width, dim] for what is ``known`` [batch, dim]."""
        scale1, shift1, gate1, scale2, shift2, gate2 = self.condition(known)[:, None, None].chunk(6, dim=-1)
        x = x + self.place(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        x = x + gate1 * self.attention(self.norm(x) * (1 + scale1) + shift1)
        return x + gate2 * self.mlp(self.norm(x) * (1 + scale2) + shift2)


class Stage(nn.Module):
    """Blocks of one resolution."""

    def __init__(self, dim: int, depth: int, *, heads: int, window: int) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(1, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.blocks = nn.ModuleList(
            Block(dim, heads=heads, window=window, shifted=index % 2 == 1) for index in range(depth)
        )

    def forward(self, x: Tensor, viscosity: Tensor) -> Tensor:
        """Return x [batch, height, width, dim] for the ``viscosity`` [batch]."""
        known = self.embed(viscosity.log10()[:, None] + 2.5)
        for block in self.blocks:
            x = block(x, known)
        return x


class WindowTransformer(nn.Module):
    """Returns a field a time later: the field, and what a U of window attention adds to it.

    Args:
        dim: Of the finer resolution; the coarser has twice as much.
        depth: Blocks of each of the three stages, even.
        heads: Of the finer resolution.
        patch: Points of the grid along each side of a token.
        window: Tokens along each side of a window.
    """

    def __init__(self, *, dim: int = 64, depth: int = 2, heads: int = 4, patch: int = 2, window: int = 4) -> None:
        super().__init__()
        self.patch = patch
        self.embed = nn.Linear(patch * patch, dim)
        self.down = Stage(dim, depth, heads=heads, window=window)
        self.merge = nn.Linear(4 * dim, 2 * dim)
        self.middle = Stage(2 * dim, depth, heads=2 * heads, window=window)
        self.split = nn.Linear(2 * dim, 4 * dim)
        self.join = nn.Linear(2 * dim, dim)
        self.up = Stage(dim, depth, heads=heads, window=window)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, patch * patch)
        nn.init.zeros_(self.head.weight)  # at first it says that nothing changes
        nn.init.zeros_(self.head.bias)

    def forward(self, field: Tensor, viscosity: Tensor) -> Tensor:
        """Return the later field for ``field`` [batch, points, points] and ``viscosity`` [batch]."""
        fine = self.down(self.embed(_gathered(field[..., None], self.patch)), viscosity)
        coarse = self.middle(self.merge(_gathered(fine, 2)), viscosity)
        fine = self.up(self.join(torch.cat([fine, _scattered(self.split(coarse), 2)], dim=-1)), viscosity)
        return field + _scattered(self.head(self.norm(fine)), self.patch).squeeze(-1)


def _gathered(x: Tensor, side: int) -> Tensor:
    """Return x [batch, height, width, dim] with squares of ``side`` in one place: [batch, ..., ..., side**2 dim]."""
    return x.unflatten(2, (-1, side)).unflatten(1, (-1, side)).transpose(2, 3).flatten(3)


def _scattered(x: Tensor, side: int) -> Tensor:
    """Undo `_gathered`."""
    return x.unflatten(3, (side, side, -1)).transpose(2, 3).flatten(3, 4).flatten(1, 2)


class Forecast(LightningModule):
    """Learns to say what a flow does next.

    Args:
        dim: Of the finer resolution.
        depth: Blocks of each of the three stages.
        lr: The highest learning rate.
        slope_weight: Of the error of the fields' slopes, beside that of their values.
    """

    def __init__(self, *, dim: int = 64, depth: int = 2, lr: float = 2e-3, slope_weight: float = 0.2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.operator = WindowTransformer(dim=dim, depth=depth)
        self.lr, self.slope_weight = lr, slope_weight

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], index: int) -> Tensor:
        """Return the loss of one step ahead."""
        now, viscosity, later = batch
        found = self.operator(now, viscosity)
        values, slopes = _error(found, later), _error(_slopes(found), _slopes(later))
        self.log_dict({"train_values": values, "train_slopes": slopes})
        return values + self.slope_weight * slopes

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        """Log the error of one step from each frame, of eight steps on end, and of saying that nothing changes."""
        films, viscosity = batch
        now, later = films[:, :-1].flatten(0, 1), films[:, 1:].flatten(0, 1)
        ahead = self.operator(now, viscosity.repeat_interleave(films.shape[1] - 1))
        far, steps = films[:, 0], min(8, films.shape[1] - 1)
        for _ in range(steps):
            far = self.operator(far, viscosity)
        errors = {
            "val_error": _error(ahead, later),
            "val_unchanged": _error(now, later),
            "val_error_far": _error(far, films[:, steps]),
            "val_unchanged_far": _error(films[:, 0], films[:, steps]),
        }
        self.log_dict(errors, batch_size=len(films))
        self._shown = torch.cat([films[0, steps], far[0], far[0] - films[0, steps]], dim=1)

    def on_validation_epoch_end(self) -> None:
        """Show a field eight steps ahead in TensorBoard: as it was, as it was said, and the difference."""
        image = (self._shown.float().cpu() / 6 + 0.5).clamp(0, 1)
        for logger in self.loggers:
            experiment = getattr(logger, "experiment", None)
            if hasattr(experiment, "add_image"):
                experiment.add_image("forecast", image, self.global_step, dataformats="HW")  # type: ignore[union-attr]

    def configure_optimizers(self) -> Any:
        """Return AdamW, without decay of biases, and a rate that rises and falls over the run."""
        weights = [p for p in self.parameters() if p.dim() > 1]
        others = [p for p in self.parameters() if p.dim() <= 1]
        optimizer = torch.optim.AdamW(
            [{"params": weights, "weight_decay": 0.02}, {"params": others, "weight_decay": 0.0}], lr=self.lr
        )
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.lr, total_steps=steps, pct_start=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _error(found: Tensor, wanted: Tensor) -> Tensor:
    """Return the mean of each field's error, relative to the field, in float32."""
    found, wanted = found.float().flatten(1), wanted.float().flatten(1)
    return ((found - wanted).norm(dim=1) / wanted.norm(dim=1)).mean()


def _slopes(field: Tensor) -> Tensor:
    return torch.stack([field.roll(-1, dims=1) - field, field.roll(-1, dims=2) - field], dim=1)
