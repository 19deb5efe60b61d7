"""Scalars of a GPU, copied to the host without waiting for the GPU."""

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_PAUSE_S = 1e-3


def comes_late(value: Any) -> bool:
    """Return whether ``value`` is a scalar that the host would have to wait for."""
    plain = type(value) is Tensor and is_far(value.device) and value.numel() == 1
    return plain and not (value.is_neg() or value.is_conj())


def is_far(device: torch.device) -> bool:
    """Return whether the host has to wait for values on ``device``."""
    return device.type == "cuda"


class LateValues:
    """Scalars that are being copied to the host, in one copy per device.

    Args:
        values: Scalars for which `comes_late` is true.
    """

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        self._names = [*values]
        self._groups: list[tuple[list[tuple[str, torch.dtype]], Tensor, Any]] = []
        for device in dict.fromkeys(value.device for value in values.values()):
            group = {name: value.detach() for name, value in values.items() if value.device == device}
            # As bytes, so that several dtypes are copied together without rounding. Reshaped twice, since a scalar of a
            # larger tensor has strides that bytes cannot have.
            packed = torch.cat([value.reshape(()).reshape(1).view(torch.uint8) for value in group.values()])
            host = packed.to("cpu", non_blocking=True)  # into pinned memory
            self._groups.append(([(name, value.dtype) for name, value in group.items()], host, _mark(device)))

    def arrived(self) -> bool:
        """Return whether all have arrived, without waiting."""
        return all(mark.query() for _, _, mark in self._groups)

    def read(self, *, patience_s: float | None = None) -> dict[str, Any]:
        """Wait for the scalars and return them as Python numbers.

        Raises:
            TimeoutError: If they have not arrived after ``patience_s`` seconds.
        """
        self._wait(patience_s)
        found: dict[str, Any] = {}
        for kinds, host, _ in self._groups:
            pieces = host.split([dtype.itemsize for _, dtype in kinds])
            for (name, dtype), piece in zip(kinds, pieces, strict=True):
                (found[name],) = piece.clone().view(dtype).tolist()  # a view of eight bytes needs their alignment
        return {name: found[name] for name in self._names}

    def _wait(self, patience_s: float | None) -> None:
        if patience_s is None:
            for _, _, mark in self._groups:
                mark.synchronize()
            return
        end = time.monotonic() + patience_s
        while not self.arrived():
            if time.monotonic() > end:
                raise TimeoutError(f"The device has not computed these values within {patience_s:g} s.")
            time.sleep(_PAUSE_S)


def _mark(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event
