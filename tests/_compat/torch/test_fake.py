import random
from threading import Lock
from typing import ClassVar

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_ups._compat.torch.fake import fake_step, fake_twin, first_batch
from tests.toys import Net, data, trainer


class Logging(Net):
    """Writes into a buffer and a list, and logs."""

    shapes: ClassVar[list] = []

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.layers[1][0].weight = self.layers[0][0].weight

    def training_step(self, batch, batch_idx):
        self.log("loss", 1.0)  # outside of fit, Lightning would warn or fail
        assert self.layers[1][0].weight is self.layers[0][0].weight
        self.shapes.append(self.layers[0][0](self.norm(batch)).shape)
        with torch.no_grad():
            self.head.weight.add_(1)
        return super().training_step(batch, batch_idx)


def test_a_step_neither_computes_nor_logs_nor_leaves_anything_behind():
    module = Logging()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with fake_twin(module) as twin:
        fake_step(twin, data())
    assert Logging.shapes.pop() == (8, 32)
    assert module.losses == []
    assert "log" not in vars(module)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


class Writing(Net):
    def training_step(self, batch, batch_idx):
        for logger in (self.logger, *self.loggers):
            logger.log_metrics({"seen": 1.0})
            logger.experiment.add_text("seen", "this")
        return super().training_step(batch, batch_idx)


def test_what_it_writes_to_its_logger_is_kept_nowhere(tmp_path):
    module = Writing()
    module.trainer = trainer(tmp_path)
    module.trainer.loggers = [CSVLogger(tmp_path)]
    with fake_twin(module) as twin:
        fake_step(twin, data())
        assert type(twin).__name__ == "Writing"
    assert module.logger is module.trainer.logger
    assert not module.logger.experiment.metrics


class Registering(Net):
    """Knows its subclasses, by a word that each must give."""

    kinds: ClassVar[dict] = {}

    def __init_subclass__(cls, *, kind, **kwargs):
        super().__init_subclass__(**kwargs)
        Registering.kinds[kind] = cls


class Registered(Registering, kind="net"):
    pass


def test_a_registry_of_classes_does_not_get_that_of_the_copy():
    with fake_twin(Registered()) as twin:
        fake_step(twin, data())
        assert type(twin).__name__ == "Registered"
    assert Registering.kinds == {"net": Registered}


def test_what_cannot_be_copied_says_what_to_give():
    module = Net()
    module.lock = Lock()
    with pytest.raises(ValueError, match=r"Net.training_step could not run.*tokens="), fake_twin(module):
        pass


class Looking(Net):
    def training_step(self, batch):
        return self.head(batch) if batch.sum().item() > 0 else None


def test_a_step_that_looks_at_values_says_what_to_give():
    message = r"Looking.training_step could not run without values.*tokens="
    with pytest.raises(ValueError, match=message), fake_twin(Looking()) as twin:
        fake_step(twin, data())


class Wrong(Net):
    def training_step(self, batch):
        return self.head(batch[:, :3])


def test_a_step_that_fails_with_values_too_is_told_so_and_nothing_is_logged(caplog):
    message = r"Wrong.training_step could not run.*fails there as well\. Mend it if fit says the same\..*tokens="
    with pytest.raises(ValueError, match=message), fake_twin(Wrong()) as twin:
        fake_step(twin, data())
    assert not caplog.records


class Manual(Net):
    """Steps two optimizers itself, as a GAN does, with everything that Lightning offers for it."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        for optimizer in (first, second):
            self.toggle_optimizer(optimizer)
            with second.toggle_model(sync_grad=True):
                loss = super().training_step(batch, batch_idx)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=1.0)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        self.lr_schedulers().step()

    def configure_optimizers(self):
        optimizers = [torch.optim.AdamW(part.parameters(), lr=0.1) for part in (self.layers, self.head)]
        return optimizers, [torch.optim.lr_scheduler.StepLR(optimizers[0], 1)]


def test_manual_optimization():
    module, called = Manual(), []
    with fake_twin(module) as twin:
        twin.head.register_forward_hook(lambda *_: called.append(1))
        fake_step(twin, data())
    assert len(called) == 2
    assert "optimizers" not in vars(module)


class Alone(Manual):
    def training_step(self, batch, batch_idx):
        self.optimizers().step()
        assert self.lr_schedulers() is None

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_manual_optimization_by_one_optimizer():
    with fake_twin(Alone()) as twin:
        fake_step(twin, data())


class Counting(Dataset):
    def __init__(self):
        self.asked = []

    def __len__(self):
        return 10

    def __getitem__(self, index):
        self.asked.append(index)
        return torch.full((2,), float(index)) + random.random() * 0


class Streaming(IterableDataset):
    def __iter__(self):
        return iter(range(7))


LOADERS = {
    "shuffled": (lambda: DataLoader(Counting(), batch_size=4, shuffle=True), (4, 2)),
    "single": (lambda: DataLoader(Counting(), batch_size=None), (2,)),
    "streamed": (lambda: DataLoader(Streaming(), batch_size=3), (3,)),
    "list": (lambda: [torch.ones(5), torch.ones(5)], (5,)),
    "own batches": (lambda: DataLoader(Counting(), batch_sampler=[[1, 2, 3], [4]]), (3, 2)),
}


@pytest.mark.parametrize(("make", "shape"), LOADERS.values(), ids=LOADERS)
def test_a_batch_has_the_shape_of_training_and_no_random_number_is_drawn(tmp_path, make, shape):
    class Reader(Net):
        def train_dataloader(self):
            return make()

    lightning, model = trainer(tmp_path), Reader()
    lightning._data_connector.attach_data(model)
    model.trainer = lightning
    before = torch.get_rng_state(), random.getstate()
    assert first_batch(lightning).shape == shape
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def test_several_loaders_give_a_batch_each(tmp_path):
    class Two(Net):
        def train_dataloader(self):
            return {"a": DataLoader(Counting(), batch_size=2), "b": DataLoader(Counting(), batch_size=3)}

    lightning, model = trainer(tmp_path), Two()
    lightning._data_connector.attach_data(model)
    model.trainer = lightning
    batch = first_batch(lightning)
    assert {name: len(value) for name, value in batch.items()} == {"a": 2, "b": 3}


def test_without_data_it_says_so(tmp_path):
    class Bare(LightningModule):
        pass

    lightning = trainer(tmp_path)
    lightning._data_connector.attach_data(Bare())
    with pytest.raises(ValueError, match="There is no data for training"):
        first_batch(lightning)
