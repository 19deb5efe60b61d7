"""How a script ends that gets a signal."""

import os
import signal

import pytest

from lightning_ups.strategies import FSDP2Strategy
from tests.strategies.cases import two_ranks
from tests.toys import Net, loader, trainer
from tests.transforms.test_error_hints import interrupted_between_two_lines


class Signalled(Net):
    def training_step(self, batch, index):
        if self.trainer.global_step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().training_step(batch, index)


@two_ranks
def test_a_script_that_gets_sigterm_exits_as_one_that_died_of_it(tmp_path):
    fit = trainer(tmp_path, strategy=FSDP2Strategy(sigterm_every=1), devices=2, epochs=8)
    with pytest.raises(SystemExit) as stopped:
        fit.fit(Signalled(), loader(4))
    assert stopped.value.code == 128 + signal.SIGTERM
    assert 1 < fit.global_step < 16


class Compiling(Net):
    """Is interrupted in a place where torch then raises another error."""

    def training_step(self, batch, index):
        interrupted_between_two_lines.__wrapped__()


@two_ranks
def test_an_interrupt_is_one_whatever_torch_raises_after_it(tmp_path):
    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit) as stopped:
            trainer(tmp_path, strategy=FSDP2Strategy(), devices=2).fit(Compiling(), loader(4))
    finally:
        signal.signal(signal.SIGINT, handler)
    assert isinstance(stopped.value.__context__, KeyboardInterrupt)
