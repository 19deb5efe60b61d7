"""A transformer that predicts fields of partial differential equations, as a plain module and as a LightningModule.

It is U-shaped: attention in shifted windows on several resolutions, conditioned by scales, shifts and gates of its
norms, as in DiT and Swin. Fields of one dimension are computed as fields of two with one row.

Shape suffixes: B batch, H and W the grid of tokens, D width, C channels.
"""
# ruff: noqa: N803, N806 (shape suffixes are capitals)

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ups.models.field_metrics import NRMSE, CorrelationTime, SpectralError, nrmse, spectral_error
from lightning_ups.models.field_pictures import log_picture, log_video, rollout_strip, rollout_video
from lightning_ups.models.optimizer import Schedule, ScheduledAdamW, muon
from lightning_ups.order.arguments import check_choice, check_finite, check_least

Boundary = Literal["periodic", "open"]
Size = Literal["tiny", "10M", "30M", "130M"]
OptimizerName = Literal["adamw", "muon"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PDEConfig:
    """The shape of a `PDETransformer`.

    Args:
        dim: Width of the finest resolution; each coarser one is twice as wide.
        depths: Blocks of each resolution, from the finest; all but the last are there twice, on the way down and up.
        head_dim: Width of one head.
        patch: Grid points along each side of a token.
        window: Tokens along each side of a window; smaller where the grid is.
        condition_dim: Width of what the blocks are conditioned by.
        channels: Of a field.
        conditions: Numbers by which a trajectory is known, such as its viscosity.
        inputs: Frames that the model is given.
        axes: Spatial dimensions, 1 or 2.
        boundary: ``periodic``, or ``open``: no window and no convolution joins opposite edges.

    Raises:
        ValueError: If a number is too small, or heads do not divide ``dim``.
    """

    dim: int
    depths: tuple[int, ...]
    head_dim: int = 32
    patch: int = 4
    window: int = 8
    condition_dim: int = 256
    channels: int = 1
    conditions: int = 0
    inputs: int = 1
    axes: int = 2
    boundary: Boundary = "periodic"

    def __post_init__(self) -> None:
        check_choice("boundary", self.boundary, get_args(Boundary), of="PDEConfig", why="It says what edges meet.")
        check_choice("axes", self.axes, (1, 2), of="PDEConfig", why="It counts spatial dimensions.")
        for name in ("channels", "inputs", "patch", "window"):
            check_least(name, getattr(self, name), 1, of="PDEConfig", why="It counts channels, frames or points.")
        if self.dim % self.head_dim:
            raise ValueError(f"head_dim={self.head_dim} does not divide dim={self.dim}. Use a multiple for dim.")

    @property
    def multiple(self) -> int:
        """The number of points along an axis must be a multiple of this."""
        return self.patch * 2 ** (len(self.depths) - 1)


SIZES: Mapping[Size, PDEConfig] = MappingProxyType(
    {
        "tiny": PDEConfig(dim=64, depths=(2, 2), condition_dim=64, patch=2, window=4),
        "10M": PDEConfig(dim=96, depths=(2, 2, 2)),
        "30M": PDEConfig(dim=160, depths=(2, 2, 3)),
        "130M": PDEConfig(dim=256, depths=(2, 4, 6)),
    }
)


class PDETransformer(nn.Module):
    """Returns the next frame: the last one, and what a U of window attention adds to it."""

    def __init__(self, config: PDEConfig) -> None:
        super().__init__()
        self.config = config
        side = self.side = (1, 2) if config.axes == 1 else (2, 2)
        self.patch = (1, config.patch) if config.axes == 1 else (config.patch, config.patch)
        points, merged = self.patch[0] * self.patch[1], side[0] * side[1]
        dims = [config.dim * 2**level for level in range(len(config.depths))]
        # One number more than there are conditions, always 1, so that none is a case like others.
        self.condition = nn.Sequential(
            nn.Linear(config.conditions + 1, config.condition_dim), nn.SiLU(),
            nn.Linear(config.condition_dim, config.condition_dim), nn.SiLU(),
        )  # fmt: skip
        self.embed = nn.Linear(points * config.inputs * config.channels, config.dim)
        self.down = nn.ModuleList(_stage(config, level) for level in range(len(dims) - 1))
        self.middle = _stage(config, len(dims) - 1)
        self.up = nn.ModuleList(_stage(config, level) for level in range(len(dims) - 1))
        self.merges = nn.ModuleList(nn.Linear(merged * dim, 2 * dim) for dim in dims[:-1])
        self.splits = nn.ModuleList(nn.Linear(2 * dim, merged * dim) for dim in dims[:-1])
        self.joins = nn.ModuleList(nn.Linear(2 * dim, dim) for dim in dims[:-1])
        self.norm = nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, points * config.channels)
        nn.init.zeros_(self.head.weight)  # at first it predicts that nothing changes
        nn.init.zeros_(self.head.bias)

    @override
    def forward(self, frames: Tensor, conditions: Tensor) -> Tensor:
        """Return the next frame [batch, channels, *grid].

        Args:
            frames: The last frames [batch, inputs, channels, *grid].
            conditions: By which the trajectory is known [batch, conditions].
        """
        grid = frames.shape[3:]
        if len(grid) != self.config.axes or any(points % self.config.multiple for points in grid):
            raise ValueError(
                f"PDETransformer expects {self.config.axes} axes with multiples of {self.config.multiple} points, not"
                f" {tuple(grid)}. Change axes, patch or the number of resolutions, or crop the fields."
            )
        known = self.condition(F.pad(conditions, (0, 1), value=1.0))
        x = frames.flatten(1, 2)
        x = x.unsqueeze(2) if self.config.axes == 1 else x
        x = self.embed(_gathered(x.permute(0, 2, 3, 1), self.patch))
        skipped = []
        for blocks, merge in zip(self.down, self.merges, strict=True):
            x = _through(blocks, x, known)
            skipped.append(x)
            x = merge(_gathered(x, self.side))
        x = _through(self.middle, x, known)
        for level in reversed(range(len(self.up))):
            x = _scattered(self.splits[level](x), self.side)
            x = _through(self.up[level], self.joins[level](torch.cat([skipped[level], x], dim=-1)), known)
        change = _scattered(self.head(self.norm(x)), self.patch).permute(0, 3, 1, 2)
        change = change.squeeze(2) if self.config.axes == 1 else change
        return frames[:, -1] + change

    def rollout(self, frames: Tensor, conditions: Tensor, *, steps: int, detach: bool = False) -> Tensor:
        """Return the next ``steps`` frames [batch, steps, channels, *grid], each predicted from those before.

        Args:
            frames: The last frames [batch, inputs, channels, *grid].
            conditions: By which the trajectory is known [batch, conditions].
            steps: Number of frames.
            detach: Let no gradient go from a step to those before it, which saves their memory in backward.
        """
        found = []
        for _ in range(steps):
            found.append(self(frames, conditions))
            last = found[-1].detach() if detach else found[-1]
            frames = torch.cat([frames[:, 1:], last[:, None]], dim=1)
        return torch.stack(found, dim=1)


class PDEBlock(nn.Module):
    """Attention in windows and a feed-forward network, with norms that are conditioned."""

    def __init__(self, config: PDEConfig, dim: int, *, is_shifted: bool) -> None:
        super().__init__()
        mode = "circular" if config.boundary == "periodic" else "zeros"
        self.place = nn.Conv2d(dim, dim, 3, padding=1, padding_mode=mode, groups=dim)  # tells tokens where they are
        self.norm = nn.LayerNorm(dim, elementwise_affine=False)
        self.attention = WindowAttention(config, dim, is_shifted=is_shifted)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.condition = nn.Linear(config.condition_dim, 6 * dim)
        nn.init.zeros_(self.condition.weight)
        with torch.no_grad():  # norms as they are and gates that are half open; gates of zero would stop gradients
            self.condition.bias.view(2, 3, dim).copy_(torch.tensor([0.0, 0.0, 0.5])[:, None])

    @override
    def forward(self, x_BHWD: Tensor, known: Tensor) -> Tensor:
        scale1, shift1, gate1, scale2, shift2, gate2 = self.condition(known)[:, None, None].chunk(6, dim=-1)
        x_BHWD = x_BHWD + self.place(x_BHWD.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        x_BHWD = x_BHWD + gate1 * self.attention(self.norm(x_BHWD) * (1 + scale1) + shift1)
        return x_BHWD + gate2 * self.mlp(self.norm(x_BHWD) * (1 + scale2) + shift2)


class WindowAttention(nn.Module):
    """Attention within windows, in every other block shifted by half of one."""

    def __init__(self, config: PDEConfig, dim: int, *, is_shifted: bool) -> None:
        super().__init__()
        self.window, self.heads, self.is_shifted = config.window, dim // config.head_dim, is_shifted
        self.is_periodic = config.boundary == "periodic"
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    @override
    def forward(self, x_BHWD: Tensor) -> Tensor:
        batch, *grid, _ = x_BHWD.shape
        # On a small grid one window has it all.
        sizes = [_largest_divisor(points, self.window) for points in grid]
        shifts = [
            size // 2 if self.is_shifted and size < points else 0 for size, points in zip(sizes, grid, strict=True)
        ]
        rows, columns = grid[0] // sizes[0], grid[1] // sizes[1]
        x = x_BHWD.roll([-shift for shift in shifts], dims=(1, 2)) if any(shifts) else x_BHWD
        x = x.unflatten(2, (columns, sizes[1])).unflatten(1, (rows, sizes[0])).transpose(2, 3)
        x = x.reshape(batch * rows * columns, sizes[0] * sizes[1], -1)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mask = None
        if any(shifts) and not self.is_periodic:
            mask = _same_side(grid, sizes, shifts, x.device).repeat(batch, 1, 1)[:, None]
        x = self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))
        x = x.view(batch, rows, columns, sizes[0], sizes[1], -1).transpose(2, 3).flatten(3, 4).flatten(1, 2)
        return x.roll(shifts, dims=(1, 2)) if any(shifts) else x


class PDEModule(ScheduledAdamW):
    """Trains a `PDETransformer` to predict fields, step by step.

    A batch is (inputs [batch, inputs, channels, *grid], targets [batch, steps, channels, *grid], conditions
    [batch, P]), as the datamodules of `lightning_ups.data.fields` give it. Training predicts as many steps as there are
    targets, each from the predictions before it. For an exponential moving average of the weights, add Lightning's
    ``EMAWeightAveraging``: validation then uses the average.

    Validation logs ``val_nrmse`` of the first step, ``val_nrmse_rollout`` of all steps, ``val_unchanged`` and
    ``val_unchanged_rollout``, the same of a prediction that nothing changes, the error of the whole rollout by bands of
    the spectrum (``val_low``, ``val_middle``, ``val_high``), ``val_correlation_steps``, and a picture of a rollout for
    each channel. TensorBoard and `TrainingReport` show it as a video, too, if fields have two axes.

    Args:
        size: A shape from `SIZES`, which the arguments down to ``boundary`` change.
        channels: Of a field.
        conditions: Numbers by which a trajectory is known.
        inputs: Frames that the model is given.
        axes: Spatial dimensions, 1 or 2.
        patch: Grid points along each side of a token.
        window: Tokens along each side of a window.
        boundary: ``periodic`` or ``open``.
        detach: Let no gradient go through a prediction to the steps before it.
        high_frequency_weight: Of the error beyond the wavenumber ``high_frequency``, added to the loss.
        high_frequency: Waves along an axis.
        correlation: The least correlation, for ``val_correlation_steps``.
        optimizer: ``adamw``, or ``muon``: torch's Muon for the matrices of hidden layers and AdamW for the rest.
        lr: The peak learning rate.
        betas: Decay of AdamW's averages.
        weight_decay: Of matrices; vectors do not decay.
        schedule: ``cosine``, ``wsd`` or ``constant``, as in `GPTModule`.
        warmup_steps: Optimizer steps over which the learning rate rises.
        final_fraction: The last learning rate as a fraction of the peak.
        decay_fraction: The part of the run over which ``wsd`` decays.
        fused: Use torch's fused AdamW. None: on CPU and CUDA.

    Raises:
        ValueError: If an argument is out of range; when fitting starts, if the data has other channels, conditions or
            axes.

    Example::

        Trainer(max_steps=500).fit(PDEModule(size="tiny", conditions=1), GeneratedFields(equation="navier_stokes"))
    """

    def __init__(
        self,
        *,
        size: Size = "tiny",
        channels: int = 1,
        conditions: int = 0,
        inputs: int = 1,
        axes: int = 2,
        patch: int | None = None,
        window: int | None = None,
        boundary: Boundary = "periodic",
        detach: bool = False,
        high_frequency_weight: float = 0.0,
        high_frequency: float = 12,
        correlation: float = 0.8,
        optimizer: OptimizerName = "adamw",
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.02,
        schedule: Schedule = "cosine",
        warmup_steps: int = 100,
        final_fraction: float = 0.01,
        decay_fraction: float = 0.2,
        fused: bool | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        check_choice("size", size, tuple(SIZES), of="PDEModule", why="It names a shape of the model.")
        self.keep_settings(
            of="PDEModule", lr=lr, betas=betas, weight_decay=weight_decay, schedule=schedule,
            warmup_steps=warmup_steps, final_fraction=final_fraction, decay_fraction=decay_fraction, fused=fused,
        )  # fmt: skip
        why = "It trains the matrices of hidden layers."
        check_choice("optimizer", optimizer, get_args(OptimizerName), of="PDEModule", why=why)
        check_finite("high_frequency_weight", high_frequency_weight, of="PDEModule", why="It is added to the loss.")
        given: dict[str, Any] = {"patch": patch, "window": window}
        given = {name: value for name, value in given.items() if value is not None}
        self.config = replace(
            SIZES[size], channels=channels, conditions=conditions, inputs=inputs, axes=axes, boundary=boundary, **given
        )
        # Built here, not in `configure_model`: EMAWeightAveraging copies the module before that.
        self.model = PDETransformer(self.config)
        self.detach, self.high_frequency_weight, self.high_frequency = detach, high_frequency_weight, high_frequency
        self.optimizer_name: OptimizerName = optimizer
        self.val_nrmse, self.val_nrmse_rollout = NRMSE(), NRMSE()
        self.val_unchanged, self.val_unchanged_rollout = NRMSE(), NRMSE()
        self.val_correlation_steps = CorrelationTime(threshold=correlation)
        self.val_bands = SpectralError()
        self._shown: tuple[Tensor, Tensor] | None = None

    @override
    def make_optimizer(self) -> Optimizer:
        if self.optimizer_name == "adamw":
            return super().make_optimizer()
        outer = (self.model.embed, self.model.head)
        return muon(self, lr=self.lr, betas=self.betas, weight_decay=self.weight_decay, fused=self.fused, outer=outer)

    @override
    def on_fit_start(self) -> None:
        data = getattr(self.trainer, "datamodule", None)
        found = {"channels": getattr(data, "fields", None), "conditions": getattr(data, "num_conditions", None)}
        found = {name: len(value) if isinstance(value, tuple) else value for name, value in found.items()}
        found |= {"axes": getattr(data, "num_axes", None), "inputs": getattr(data, "inputs", None)}
        wrong = {
            name: value
            for name, value in found.items()
            if isinstance(value, int) and value != getattr(self.config, name)
        }
        if wrong:
            have = ", ".join(f"{name}={value}" for name, value in wrong.items())
            mine = ", ".join(f"{name}={getattr(self.config, name)}" for name in wrong)
            raise ValueError(f"{type(data).__name__} gives {have}, and the model has {mine}. Use PDEModule({have}).")

    @override
    def forward(self, frames: Tensor, conditions: Tensor) -> Tensor:
        """Return the next frame [batch, channels, *grid] after ``frames`` [batch, inputs, channels, *grid]."""
        return self.model(frames, conditions)

    @override
    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, targets, conditions = batch
        found = self.model.rollout(inputs, conditions, steps=targets.shape[1], detach=self.detach).flatten(0, 1)
        loss = nrmse(found, targets.flatten(0, 1))
        self.log("train_nrmse", loss)  # not on the progress bar, for which Lightning waits for the GPU in each step
        if self.high_frequency_weight:
            bands = spectral_error(found, targets.flatten(0, 1), edges=(self.high_frequency,))
            loss = loss + self.high_frequency_weight * bands[-1]
        return loss

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> None:
        inputs, targets, conditions = batch
        found = self.model.rollout(inputs, conditions, steps=targets.shape[1])
        still = inputs[:, -1:].expand_as(targets)
        self.val_nrmse.update(found[:, 0], targets[:, 0])
        self.val_unchanged.update(still[:, 0], targets[:, 0])
        self.val_nrmse_rollout.update(found.flatten(0, 1), targets.flatten(0, 1))
        self.val_unchanged_rollout.update(still.flatten(0, 1), targets.flatten(0, 1))
        self.val_bands.update(found.flatten(0, 1), targets.flatten(0, 1))
        self.val_correlation_steps.update(found, targets)
        if batch_idx == 0:
            self._shown = targets[0], found[0]

    @override
    def on_validation_epoch_end(self) -> None:
        names = ("val_nrmse", "val_nrmse_rollout", "val_unchanged", "val_unchanged_rollout", "val_correlation_steps")
        for name in names:
            self.log(name, getattr(self, name), prog_bar=name == "val_nrmse")
        bands: dict[str, Any] = dict(
            zip(("val_low", "val_middle", "val_high"), self.val_bands.compute().unbind(), strict=True)
        )
        self.val_bands.reset()
        self.log_dict(bands, sync_dist=True)  # equal on all ranks
        shown, self._shown = self._shown, None
        if shown is None or not self.trainer.is_global_zero or self.trainer.sanity_checking:
            return
        data = getattr(self.trainer, "datamodule", None)
        fields = getattr(data, "fields", None) or [f"channel_{index}" for index in range(self.config.channels)]
        for index, name in enumerate(fields):
            target, found = (frames[:, index] for frames in shown)
            log_picture(self.loggers, f"rollout/{name}", rollout_strip(target, found), step=self.global_step)
            if self.config.axes == 2:
                video = rollout_video(target, found)
                log_video(self.loggers, f"rollout_video/{name}", video, step=self.global_step)


def _stage(config: PDEConfig, level: int) -> nn.ModuleList:
    dim = config.dim * 2**level
    return nn.ModuleList(PDEBlock(config, dim, is_shifted=index % 2 == 1) for index in range(config.depths[level]))


def _through(blocks: Any, x_BHWD: Tensor, known: Tensor) -> Tensor:
    for block in blocks:
        x_BHWD = block(x_BHWD, known)
    return x_BHWD


def _gathered(x_BHWD: Tensor, side: tuple[int, int]) -> Tensor:
    """Return x with rectangles of ``side`` in one place: [batch, height / side, width / side, points x dim]."""
    x = x_BHWD.unflatten(2, (-1, side[1])).unflatten(1, (-1, side[0])).transpose(2, 3)
    return x.flatten(3)


def _scattered(x_BHWD: Tensor, side: tuple[int, int]) -> Tensor:
    """Undo `_gathered`."""
    return x_BHWD.unflatten(3, (*side, -1)).transpose(2, 3).flatten(3, 4).flatten(1, 2)


def _largest_divisor(points: int, most: int) -> int:
    return next(size for size in range(min(most, points), 0, -1) if points % size == 0)


def _same_side(grid: list[int], sizes: list[int], shifts: list[int], device: torch.device) -> Tensor:
    """Return which tokens of each shifted window are on the same side of the edges [windows, tokens, tokens]."""
    # After the roll, the last ``shift`` tokens along an axis come from the other edge.
    sides = [torch.arange(points, device=device) >= points - shift for points, shift in zip(grid, shifts, strict=True)]
    side = (sides[0][:, None] * 2 + sides[1].long()).unflatten(1, (-1, sizes[1])).unflatten(0, (-1, sizes[0]))
    side = side.transpose(1, 2).flatten(2).flatten(0, 1)
    return side[:, :, None] == side[:, None]
