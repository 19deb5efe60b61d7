"""Pictures of fields, in plain torch, and where loggers take them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# Blue, white and red, and two between; zero is white.
_COLORS = ((0.02, 0.19, 0.38), (0.40, 0.66, 0.81), (0.97, 0.97, 0.97), (0.94, 0.54, 0.38), (0.40, 0.00, 0.12))
_GAP = 2  # white points between fields


def colored(field: Tensor, *, limit: Tensor | float) -> Tensor:
    """Return ``field`` [*any] as colors in uint8 [3, *any]: blue at ``-limit``, white at zero, red at ``limit``."""
    table = torch.tensor(_COLORS)
    place = ((field.float().cpu() / limit + 1) / 2).nan_to_num(nan=0.5).clamp(0, 1) * (len(table) - 1)
    low = place.floor().clamp(max=len(table) - 2)
    share = (place - low)[..., None]
    low = low.long()
    return ((1 - share) * table[low] + share * table[low + 1]).mul(255).round().to(torch.uint8).movedim(-1, 0)


def rollout_strip(target: Tensor, prediction: Tensor, *, columns: int = 8) -> Tensor:
    """Return an image [3, height, width] of a rollout: the target above the prediction above the error.

    Fields of two dimensions are shown at up to ``columns`` times, from left to right. Those of one dimension are shown
    once, with the time from top to bottom. The three share one scale, so that the error is seen at its size.

    Args:
        target: [time, *grid].
        prediction: [time, *grid].
        columns: Number of times.
    """
    target, prediction = target.detach().float().cpu(), prediction.detach().float().cpu()
    limit = target.abs().max().clamp(min=1e-8)
    rows = [colored(field, limit=limit) for field in (target, prediction, prediction - target)]
    if target.dim() == 2:
        thick = max(1, 64 // len(target))  # a frame is a line of this many points
        return _joined([row.repeat_interleave(thick, dim=1) for row in rows], dim=1)
    times = torch.linspace(0, len(target) - 1, min(columns, len(target))).round().long()
    return _joined([_joined([row[:, time] for time in times], dim=2) for row in rows], dim=1)


def log_picture(loggers: Sequence[Any], name: str, image: Tensor, *, step: int) -> None:
    """Give ``image`` [3, height, width] to each of the ``loggers`` that takes images, on rank 0.

    TensorBoard, Weights & Biases, Comet and MLflow do; a logger without images, such as CSVLogger, is left alone.
    """
    for logger in loggers:
        experiment: Any = getattr(logger, "experiment", None)
        if hasattr(experiment, "add_image"):  # TensorBoard
            experiment.add_image(name, image, step)
            continue
        pixels = image.permute(1, 2, 0).contiguous().numpy()
        if hasattr(logger, "log_image"):  # Weights & Biases, and loggers that follow it
            logger.log_image(key=name, images=[pixels], step=step)
        elif hasattr(experiment, "log_image"):
            if hasattr(logger, "run_id"):  # MLflow
                experiment.log_image(logger.run_id, pixels, key=name.replace("/", "_"), step=step)
            else:  # Comet
                experiment.log_image(pixels, name=name, step=step)


def _joined(parts: Sequence[Tensor], *, dim: int) -> Tensor:
    shape = list(parts[0].shape)
    shape[dim] = _GAP
    gap = torch.full(shape, 255, dtype=torch.uint8)
    spaced = [piece for part in parts for piece in (gap, part)][1:]
    return torch.cat(spaced, dim=dim)
