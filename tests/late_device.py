"""A GPU on paper: tensors of the CPU are taken for its own, and it comes to what it is told some batches later."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_ups.callbacks import acceleration_flags
from lightning_ups.insight import late_values


class LateDevice:
    """Comes to each mark ``lag`` batches after it was set, and notes when the host waited for one."""

    def __init__(self, *, lag):
        self.lag, self.batch, self.reached, self.waits, self.marks = lag, 0, -1, [], 0
        self.interrupts = False  # whether the user has had enough of the next wait

    def mark(self, _):
        self.marks += 1
        return Mark(self, self.batch)


class Mark:
    def __init__(self, device, batch):
        self.device, self.batch = device, batch

    def query(self):
        return self.batch <= max(self.device.reached, self.device.batch - self.device.lag)

    def synchronize(self):
        if self.device.interrupts:
            self.device.interrupts = False
            self.device.reached = 1000  # it answers, but later
            raise KeyboardInterrupt
        if not self.query():
            self.device.waits.append(self.device.batch)
            self.device.reached = self.batch


class Reads(TorchDispatchMode):
    """Counts how often a real number is read out of a tensor: a GPU would have to finish its work."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default and args[0].is_floating_point()
        return func(*args, **(kwargs or {}))


def put_in_place(setattr_, *, lag):
    """Take tensors of the CPU for those of a device that is ``lag`` batches behind, and return it."""
    device = LateDevice(lag=lag)
    setattr_(late_values, "_mark", device.mark)
    for module in (late_values, acceleration_flags):
        setattr_(module, "is_far", lambda device: isinstance(device, torch.device))
    return device
