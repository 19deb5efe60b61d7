import random

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from lightning_ups._compat.lightning.data.dataloader import Followed, generators_of, keeps_workers, reads_by_index


class Recorder:
    def __init__(self):
        self.iterators, self.seen = 0, []

    def iterate(self, make):
        self.iterators += 1
        return make()

    def indices(self, sampler):
        for index in sampler:
            self.seen.append(index)
            yield index


def test_a_followed_loader_gives_the_same_and_is_given_back():
    loader, recorder = DataLoader(range(10), batch_size=4), Recorder()
    expected = [batch.tolist() for batch in loader]
    followed = Followed(loader, recorder)
    assert isinstance(loader, DataLoader)
    assert len(loader) == 3
    assert [batch.tolist() for batch in loader] == expected
    assert recorder.seen == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    followed.release()
    assert type(loader) is DataLoader
    assert [batch.tolist() for batch in loader] == expected
    assert recorder.iterators == 1


class Rows:
    def __init__(self, draw):
        self.draw = draw

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if self.draw == "torch":
            return torch.rand(()) + index
        return index + (random.random() if self.draw == "python" else 0)


def start(worker):
    torch.rand(3)  # drawing here is no drawing for a batch


@pytest.mark.parametrize(("draw", "drawn"), [("", False), ("torch", True), ("python", True)])
def test_workers_that_draw_are_found(draw, drawn):
    loader = DataLoader(Rows(draw), batch_size=4, num_workers=1, worker_init_fn=start)
    followed = Followed(loader, Recorder())
    list(loader)
    assert followed.workers_draw is drawn
    followed.release()
    assert loader.worker_init_fn is start


def test_distinct_generators_are_found():
    generator, other = torch.Generator(), torch.Generator()
    sampler = RandomSampler(range(4), generator=other)
    assert generators_of(DataLoader(range(4))) == []
    assert generators_of(DataLoader(range(4), shuffle=True, generator=generator)) == [generator]
    assert generators_of(DataLoader(range(4), sampler=sampler, generator=generator)) == [generator, other]
    assert generators_of(DataLoader(range(4), batch_sampler=BatchSampler(sampler, 2, drop_last=False))) == [other]


class Stream(IterableDataset):
    def __iter__(self):
        yield from range(3)


def test_what_can_skip_without_reading():
    assert reads_by_index(DataLoader(range(4)))
    assert not reads_by_index(DataLoader(Stream()))
    assert not reads_by_index([1, 2])


def test_workers_that_live_on():
    loader = DataLoader(range(4), num_workers=1, persistent_workers=True)
    assert not keeps_workers(loader)
    list(loader)
    assert keeps_workers(loader)
    assert not keeps_workers(DataLoader(range(4)))
