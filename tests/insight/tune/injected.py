"""Settings with a known cost, for tests of searches: callbacks that sleep, and modules that fail."""

import time

import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader

from lightning_ups.__main__ import main
from lightning_ups.insight.tune import Engine
from tests import cli_toys


class Sleeping(Callback):
    """Costs ``seconds`` in each step."""

    def __init__(self, seconds: float = 0.0):
        self.seconds = seconds

    def on_train_batch_start(self, *_):
        time.sleep(self.seconds)


class Idle(Callback):
    """Has no effect."""


class Timed(cli_toys.Toy):
    """Sleeps, so that the noise of the machine is small compared with a step."""

    def __init__(self, seconds: float = 0.1, exhausts: bool = False, hangs: bool = False):
        super().__init__()
        self.seconds, self.exhausts, self.hangs = seconds, exhausts, hangs

    def training_step(self, batch, index):
        if self.exhausts:
            raise torch.OutOfMemoryError("out of memory on purpose")
        time.sleep(3600 if self.hangs else self.seconds)
        return super().training_step(batch, index)


def engine_here():
    """Return an engine that runs `measured_fit` in this process, without the seconds of starting one."""

    class Here(Engine):
        def call(self, command, *, limit, slot="", output=None):
            if "measured_fit" not in command:
                return super().call(command, limit=limit, slot=slot, output=output)
            self.count += 1
            try:
                return main([*command[command.index("measured_fit") :]]), ""
            except Exception as error:  # noqa: BLE001  (as a process that ends with a traceback)
                return 1, str(error)

    return Here


class Sized(cli_toys.Data):
    """Takes what `tune` may change."""

    def __init__(self, batch_size: int = 4, num_workers: int = 0, size: int = 640):
        super().__init__(size)
        self.batch_size, self.num_workers = batch_size, num_workers

    def train_dataloader(self):
        return DataLoader(torch.ones(self.size, 8), batch_size=self.batch_size)
