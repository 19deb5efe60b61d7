from lightning.pytorch import Callback
from lightning.pytorch.callbacks import TQDMProgressBar

from lightning_ups.strategies.between import hooks_between_microbatches
from tests.toys import Net, trainer


class Averages(Callback):
    def on_train_batch_end(self, *_):
        pass


class Own(Net):
    def on_after_backward(self):
        pass


def test_hooks_of_the_user_are_named(tmp_path):
    model = Own()
    model.trainer = trainer(tmp_path, callbacks=[Averages()])
    assert hooks_between_microbatches(model) == ["Own.on_after_backward", "Averages.on_train_batch_end"]


def test_those_of_lightning_look_after_a_step(tmp_path):
    model = Net()
    model.trainer = trainer(tmp_path, callbacks=[])
    model.trainer.callbacks.append(TQDMProgressBar())
    assert hooks_between_microbatches(model) == []


def test_one_that_is_set_on_the_module_counts(tmp_path):
    model = Net()
    model.trainer = trainer(tmp_path)
    model.on_train_batch_end = lambda *_: None
    assert hooks_between_microbatches(model) == ["Net.on_train_batch_end"]
