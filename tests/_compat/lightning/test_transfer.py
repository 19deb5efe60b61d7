from contextlib import contextmanager

import pytest
from lightning.pytorch import Callback, LightningDataModule
from torch.utils.data import DataLoader, IterableDataset

from lightning_ups._compat.lightning.transfer import (
    around_transfer,
    batches_ahead,
    epoch_goes_on,
    loop_moves,
    own_hooks,
    training_iterators,
)
from tests.toys import Net, data, loader, trainer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Telling(Net):
    def __init__(self, said):
        super().__init__()
        self.said = said

    def on_before_batch_transfer(self, batch, dataloader_idx):
        self.said.append("before")
        return batch

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        self.said.append("transfer")
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.said.append("after")
        return batch

    def validation_step(self, batch):
        self.said.append("validation")


class Around(Callback):
    def __init__(self, said):
        self.said = said

    @contextmanager
    def context(self):
        self.said.append("(")
        yield
        self.said.append(")")

    def on_train_start(self, trainer, pl_module):
        self.undo = around_transfer(trainer, self.context)


def test_only_the_transfer_of_training_batches_is_within_the_context(tmp_path):
    said = []
    around = Around(said)
    run = trainer(tmp_path, callbacks=[around], epochs=1)
    run.fit(Telling(said), loader(), loader())
    sanity = validation = ["before", "transfer", "after", "validation"]
    assert said == [*sanity, "before", "(", "transfer", ")", "after", *validation]
    around.undo()
    assert "batch_to_device" not in vars(run.strategy)


def test_a_datamodules_hooks_are_called_as_ever(tmp_path):
    said = []

    class Data(LightningDataModule):
        def train_dataloader(self):
            return loader()

        def transfer_batch_to_device(self, batch, device, dataloader_idx):
            said.append("datamodule")
            return batch

    trainer(tmp_path, callbacks=[Around(said)], epochs=1).fit(Net(), Data())
    assert said == ["(", "datamodule", ")"]


def test_who_moves_batches_in_another_way_still_does(tmp_path):
    said = []

    class Replaced(Around):
        def on_train_start(self, trainer, pl_module):
            stock = trainer.strategy.batch_to_device

            def own(batch, device=None, dataloader_idx=0):
                said.append("own")
                return stock(batch, device, dataloader_idx)

            trainer.strategy.batch_to_device = own
            super().on_train_start(trainer, pl_module)
            self.own = own

    around = Replaced(said)
    run = trainer(tmp_path, callbacks=[around], epochs=1)
    run.fit(Net(), loader())
    assert said == ["(", "own", ")"]
    around.undo()
    assert run.strategy.batch_to_device is around.own


def test_hooks_of_the_users_are_named(tmp_path):
    class Data(LightningDataModule):
        def train_dataloader(self):
            return loader()

        def on_before_batch_transfer(self, batch, dataloader_idx):
            return batch

    run = trainer(tmp_path, epochs=1)
    run.fit(Net(), loader())
    assert own_hooks(run) == []
    run = trainer(tmp_path, epochs=1)
    run.fit(Telling([]), Data())
    assert own_hooks(run) == [
        "Data.on_before_batch_transfer",
        "Telling.on_before_batch_transfer",
        "Telling.transfer_batch_to_device",
    ]


class Watching(Callback):
    def __init__(self):
        self.found = []

    def on_before_backward(self, trainer, pl_module, loss):
        assert loop_moves(trainer)
        ((_, iterator),) = training_iterators(trainer)
        assert hasattr(iterator, "__next__")
        self.found.append((epoch_goes_on(trainer), len(batches_ahead(trainer))))


def watched(tmp_path, loader, **options):
    watching = Watching()
    run = trainer(tmp_path, callbacks=[watching], **{"epochs": 1, **options})
    run.fit(Net(), loader)
    return watching.found


class Stream(IterableDataset):
    def __iter__(self):
        return iter(data())


def test_whether_an_epoch_goes_on(tmp_path):
    four = DataLoader(data(), batch_size=2)
    yes, no = (True, 0), (False, 0)
    assert watched(tmp_path, four) == [yes, yes, yes, no]
    assert watched(tmp_path, four, epochs=2) == [yes, yes, yes, no] * 2
    assert watched(tmp_path, four, limit_train_batches=2) == [yes, no]
    assert watched(tmp_path, four, max_steps=3) == [yes, yes, no]
    assert watched(tmp_path, four, max_steps=2, accumulate_grad_batches=2) == [yes, yes, yes, no]


def test_what_the_loop_holds_of_a_loader_without_length(tmp_path):
    stream = DataLoader(Stream(), batch_size=4)
    assert watched(tmp_path, stream) == [(False, 1), (False, 0)]
    assert watched(tmp_path, stream, limit_train_batches=1) == [(False, 0)]


def test_a_step_that_takes_an_iterator_moves_batches_by_itself(tmp_path):
    found = []

    class Own(Net):
        def training_step(self, dataloader_iter):
            found.append(loop_moves(self.trainer))
            batch, _, _ = next(dataloader_iter)
            return super().training_step(batch, 0)

    trainer(tmp_path, epochs=1).fit(Own(), loader())
    assert found == [False]
