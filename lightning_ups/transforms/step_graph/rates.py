"""Learning rates in device memory, which a captured optimizer step reads."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_ups._compat.torch.optimizers import has_own_step, has_step_hooks

_CAPTURABLE = (Adam, AdamW, SGD)


def can_capture(optimizer: Optimizer) -> str | None:
    """Return None if the step of ``optimizer`` can be captured, else why it cannot, with the cure."""
    if type(optimizer) not in _CAPTURABLE:
        return f"{type(optimizer).__name__} is not one of torch's Adam, AdamW and SGD"
    if not all(group.get("fused") for group in optimizer.param_groups):
        return f"give {type(optimizer).__name__} fused=True to include it"
    if has_own_step(optimizer) or has_step_hooks(optimizer):
        return f"{type(optimizer).__name__} has step hooks"
    return None


class Rates:
    """The learning rates of an optimizer, and its other options, which are constants of a captured step."""

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self._groups = optimizer.param_groups
        # The fused CUDA kernels read a float32 rate, those of a CPU any.
        dtype = torch.float32 if device.type == "cuda" else torch.float64
        self._last = [float(group["lr"]) for group in self._groups]
        self.tensors = [torch.tensor(rate, dtype=dtype, device=device) for rate in self._last]
        self._keys = [
            [key for key, value in group.items() if key not in ("params", "lr") and not isinstance(value, Tensor)]
            for group in self._groups
        ]
        self._options = self._read()

    def _read(self) -> list[Any]:
        return [
            [len(group["params"]), *[group[key] for key in keys]]
            for group, keys in zip(self._groups, self._keys, strict=True)
        ]

    def changed(self) -> bool:
        """Return whether anything but a learning rate has changed."""
        return len(self._groups) != len(self._keys) or self._read() != self._options

    def update(self) -> None:
        """Write the learning rates that have changed to the device."""
        for index, group in enumerate(self._groups):
            if (rate := group["lr"]) != self._last[index]:
                self._last[index] = rate = float(rate)
                self.tensors[index].fill_(rate)


@contextmanager
def device_rates(optimizer: Optimizer, rates: Rates | None) -> Iterator[None]:
    """Let ``optimizer`` read its learning rates from the device, and be captured, while the context is open."""
    if rates is None:
        yield
        return
    before = [{key: group[key] for key in ("lr", "capturable") if key in group} for group in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, rates.tensors, strict=True):
        group["lr"] = rate
        if "capturable" in group:
            group["capturable"] = True
    try:
        yield
    finally:
        for group, values in zip(optimizer.param_groups, before, strict=True):
            group.update(values)
