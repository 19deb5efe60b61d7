import numpy
import pytest
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from lightning_ups.state.resume.sampler import as_text, order_of, put_back_seed

ROWS = range(12)


def distributed(seed=3, *, shuffle=True):
    return DistributedSampler(ROWS, 2, 0, seed=seed, shuffle=shuffle)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(ROWS)


class Batches:
    """A batch sampler that draws by itself."""

    seed = 5

    def __iter__(self):
        return iter([[0, 1], [2, 3]])


@pytest.mark.parametrize(
    ("loader", "text"),
    [
        (DataLoader(ROWS), "SequentialSampler"),
        (DataLoader(ROWS, shuffle=True), "RandomSampler"),
        (DataLoader(ROWS, sampler=distributed()), "DistributedSampler(shuffle=True, seed=3)"),
        (DataLoader(ROWS, sampler=distributed(shuffle=False)), "SequentialSampler"),
        (DataLoader(ROWS, sampler=distributed(numpy.int64(3))), "DistributedSampler(shuffle=True, seed=3)"),
        (
            DataLoader(ROWS, sampler=DistributedSamplerWrapper(RandomSampler(ROWS), 2, 0, shuffle=False)),
            "DistributedSamplerWrapper(shuffle=False, seed=0)",
        ),
        (
            DataLoader(ROWS, batch_sampler=BatchSampler(distributed(), 2, drop_last=False)),
            "DistributedSampler(shuffle=True, seed=3)",
        ),
        (DataLoader(ROWS, batch_sampler=Batches()), "Batches(seed=5)"),
        (DataLoader(ROWS, batch_size=None, sampler=SequentialSampler(ROWS)), "SequentialSampler"),
    ],
)
def test_the_order_of_a_loader(loader, text):
    assert as_text(order_of(loader)) == text
    assert {type(value) for value in order_of(loader).values()} <= {str, int, bool, type(None)}


@pytest.mark.parametrize("loader", [DataLoader(Stream()), [1, 2]])
def test_what_no_sampler_orders(loader):
    assert order_of(loader) is None


@pytest.mark.parametrize("sampler", [RandomSampler(ROWS), Batches(), distributed(shuffle=False)])
def test_a_seed_of_another_sampler_is_not_put_back(sampler):
    loader, order = DataLoader(ROWS, sampler=sampler), order_of(DataLoader(ROWS, sampler=distributed(9)))
    before = vars(sampler).copy()
    put_back_seed(loader, order)
    assert vars(sampler) == before


def test_a_seed_is_put_back():
    loader, before = DataLoader(ROWS, sampler=distributed(77)), DataLoader(ROWS, sampler=distributed(1))
    put_back_seed(loader, order_of(before))
    assert [*loader.sampler] == [*before.sampler]
