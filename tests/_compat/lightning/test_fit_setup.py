import random

import pytest
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_ups._compat.lightning.fit_setup import first_batch, optimizers_of
from tests.toys import Net, trainer


def test_optimizers_and_schedulers_of_every_form():
    optimizer = torch.optim.SGD([torch.ones(1)], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert [len(found) for found in optimizers_of(None)] == [0, 0]
    assert optimizers_of(optimizer) == ([optimizer], [])
    for form in ([[optimizer], [scheduler]], {"optimizer": optimizer, "lr_scheduler": scheduler}):
        assert [len(found) for found in optimizers_of(form)] == [1, 1]


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
    with pytest.raises(ValueError, match="There is no training data"):
        first_batch(lightning)
