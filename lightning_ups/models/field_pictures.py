"""Pictures and videos of fields, in plain torch, and where loggers take them."""

import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

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


def rollout_video(target: Tensor, prediction: Tensor, *, seconds: float = 0.25) -> bytes:
    """Return an animated PNG of a rollout of two dimensions.

    Each frame shows the target, the prediction and the error, from left to right, on one scale. Browsers play it, in
    TensorBoard and in a report too. Other programs show the first frame.

    Args:
        target: [time, height, width].
        prediction: [time, height, width].
        seconds: Of each frame.
    """
    target, prediction = target.detach().float().cpu(), prediction.detach().float().cpu()
    limit = target.abs().max().clamp(min=1e-8)
    zoom = max(1, 128 // target.shape[1])
    shades = 255  # of 256 colors; the last is the white between fields
    fields = [
        ((field / limit + 1) / 2 * (shades - 1))
        .nan_to_num(nan=shades // 2)
        .clamp(0, shades - 1)
        .round()
        .to(torch.uint8)
        for field in (target, prediction, prediction - target)
    ]
    frames = _joined([field.repeat_interleave(zoom, 1).repeat_interleave(zoom, 2) for field in fields], dim=2)
    palette = F.pad(colored(torch.linspace(-1, 1, shades), limit=1), (0, 1), value=255)
    return b"".join(_animated_png(frames, palette.T.contiguous(), milliseconds=round(seconds * 1000)))


def _animated_png(frames: Tensor, palette: Tensor, *, milliseconds: int) -> Iterator[bytes]:
    """Yield the parts of a file, as https://www.w3.org/TR/png-3/ has them.

    Args:
        frames: Colors by their number, in uint8 [time, height, width].
        palette: The colors, in uint8 [256, 3].
        milliseconds: Of each frame.
    """

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    time, height, width = frames.shape
    yield b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0))
    yield chunk(b"PLTE", palette.numpy().tobytes()) + chunk(b"acTL", struct.pack(">II", time, 0))
    for index, lines in enumerate(F.pad(frames, (1, 0))):  # each line begins with its filter, here none
        control = struct.pack(">IIIIIHHBB", max(0, 2 * index - 1), width, height, 0, 0, milliseconds, 1000, 0, 0)
        pixels = zlib.compress(lines.numpy().tobytes())
        yield chunk(b"fcTL", control)
        yield chunk(b"fdAT", struct.pack(">I", 2 * index) + pixels) if index else chunk(b"IDAT", pixels)
    yield chunk(b"IEND", b"")


def log_video(loggers: Sequence[Any], name: str, video: bytes, *, step: int) -> None:
    """Give ``video``, from `rollout_video`, to TensorBoard, whose images may be animated; on rank 0."""
    from tensorboard.compat.proto import summary_pb2

    messages: Any = summary_pb2
    width, height = struct.unpack_from(">II", video, 16)
    image = messages.Summary.Image(width=width, height=height, colorspace=3, encoded_image_string=video)
    summary = messages.Summary(value=[messages.Summary.Value(tag=name, image=image)])
    for logger in loggers:
        if (writer := getattr(getattr(logger, "experiment", None), "file_writer", None)) is not None:
            writer.add_summary(summary, step)


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
