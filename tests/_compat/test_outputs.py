import pytest
import torch
from lightning.pytorch import Callback

from lightning_ups._compat.outputs import was_skipped
from tests.toys import Net, loader, trainer


class Asks(Callback):
    def __init__(self):
        self.answers = []

    def on_train_batch_end(self, trainer, pl_module, outputs, *args):
        self.answers.append(was_skipped(pl_module, outputs))


class SkipsEverySecond(Net):
    def __init__(self, *, wrap):
        super().__init__()
        self.wrap = wrap

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        return None if index % 2 else self.wrap(loss)


class Manual(Net):
    automatic_optimization = False

    def training_step(self, batch, index):
        self.manual_backward(super().training_step(batch, index))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("wrap", [lambda loss: loss, lambda loss: {"loss": loss, "more": torch.ones(2)}])
def test_a_step_that_returns_nothing_was_skipped(tmp_path, wrap):
    asks = Asks()
    trainer(tmp_path, callbacks=[asks], epochs=1).fit(SkipsEverySecond(wrap=wrap), loader(2))
    assert asks.answers == [False, True, False, True]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_module_that_optimizes_itself_skips_nothing_once_it_has_stepped(tmp_path):
    class StepsFromTheSecond(Manual):
        def training_step(self, batch, index):
            if index:
                super().training_step(batch, index)
                self.optimizers().step()

    asks = Asks()
    trainer(tmp_path, callbacks=[asks], epochs=1).fit(StepsFromTheSecond(), loader(2))
    assert asks.answers == [True, False, False, False]
