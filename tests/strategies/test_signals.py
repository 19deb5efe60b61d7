"""How a script ends that gets a signal."""

import os
import signal

import pytest

from lightning_ups.strategies import FSDP2Strategy
from tests.toys import Net, loader, trainer
from tests.transforms.fsdp.test_interrupts import interrupted_between_two_lines


class Signalled(Net):
    def training_step(self, batch, index):
        if self.trainer.global_step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().training_step(batch, index)


class Compiling(Net):
    """Is interrupted in a place where torch then raises another error."""

    def training_step(self, batch, index):
        interrupted_between_two_lines.__wrapped__()


def code_of(path, kind):
    handler = signal.getsignal(signal.SIGINT)
    fit = trainer(path, strategy=FSDP2Strategy(sigterm_every=1), devices=2, epochs=8)
    try:
        with pytest.raises(SystemExit) as stopped:
            fit.fit(kind(), loader(4))
    finally:
        signal.signal(signal.SIGINT, handler)
    return stopped.value.code, type(stopped.value.__context__).__name__, fit.global_step


def test_a_script_that_gets_sigterm_exits_as_one_that_died_of_it(ranks, tmp_path):
    code, _, steps = ranks(code_of, tmp_path, Signalled)
    assert code == 128 + signal.SIGTERM
    assert 1 < steps < 16


def test_an_interrupt_is_one_whatever_torch_raises_after_it(ranks, tmp_path):
    assert ranks(code_of, tmp_path, Compiling) == (1, "KeyboardInterrupt", 0)
