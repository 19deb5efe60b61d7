import contextlib
import gc
import random
import weakref

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
)

from lightning_ups._compat.lightning.loaders import (
    Followed,
    generators_of,
    read_ahead,
    reads_by_index,
    why_not,
)
from lightning_ups.state.resume.loader import FollowedLoader


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


# Python 3.12 says so of every worker that is forked.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")


class ReadRows(Dataset):
    def __init__(self, broken=None):
        self.broken = broken

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == self.broken:
            raise KeyError("this row is broken")
        return index


class ReadStream(IterableDataset):
    def __iter__(self):
        return iter(range(8))


class Own(Sampler):
    def __iter__(self):
        return iter(range(8))

    def __len__(self):
        return 8


def reason(**options):
    loader = DataLoader(**{"dataset": ReadRows(), "num_workers": 1, **options})
    return why_not(loader, iter(loader))


def with_generator(**options):
    return RandomSampler(ReadRows(), generator=torch.Generator(), **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shuffle": True},
        {"batch_size": None},
        {"dataset": ReadStream()},
        {"sampler": RandomSampler(ReadRows(), replacement=True)},
        {"sampler": with_generator()},
        {"sampler": DistributedSampler(ReadRows(), num_replicas=2, rank=0)},
    ],
    ids=lambda given: "+".join(given) if isinstance(given, dict) else None,
)
def test_workers_whose_order_is_settled_are_read_ahead(options):
    assert reason(**options) is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_workers": 0}, r"num_workers=0"),
        ({"sampler": Own()}, "may draw random numbers"),
        ({"sampler": with_generator(replacement=True)}, "may draw random numbers"),
        ({"sampler": with_generator(num_samples=20)}, "may draw random numbers"),
        ({"batch_sampler": BatchSampler(Own(), 2, drop_last=False)}, "may draw random numbers"),
    ],
    ids=lambda given: "+".join(given) if isinstance(given, dict) else None,
)
def test_others_are_not(options, words):
    assert words in reason(**options)


def test_nobody_can_tell():
    loader = DataLoader(ReadRows(), batch_size=2, num_workers=1)
    expected = [batch.tolist() for batch in loader]
    iterator = iter(loader)
    found = []
    before = torch.get_rng_state()
    for n in range(4):
        found.append(next(iterator).tolist())
        assert iterator._num_yielded == n + 1
        if n < 3:
            assert read_ahead(iterator).tolist() == read_ahead(iterator).tolist() == expected[n + 1]
    assert found == expected
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(StopIteration):
        next(iterator)


def test_an_error_comes_when_it_is_asked_for():
    iterator = iter(DataLoader(ReadRows(broken=2), batch_size=2, num_workers=1))
    next(iterator)
    assert read_ahead(iterator) is None
    with pytest.raises(KeyError, match="this row is broken"):
        next(iterator)
    assert next(iterator).tolist() == [4, 5]


def test_workers_that_live_on_begin_anew():
    loader = DataLoader(ReadRows(), batch_size=2, num_workers=1, persistent_workers=True)
    iterator = iter(loader)
    next(iterator)
    read_ahead(iterator)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize("broken", [None, 0, 2], ids=["in use", "with an error", "with an error ahead"])
def test_an_iterator_goes_with_its_last_reference(broken):
    gc.disable()  # it has workers to stop, which must not wait for that
    try:
        iterator = iter(DataLoader(ReadRows(broken=broken), batch_size=2, num_workers=1))
        if broken == 2:
            next(iterator)
        read_ahead(iterator)
        if broken == 0:
            with contextlib.suppress(KeyError):
                next(iterator)
        gone = weakref.ref(iterator)
        del iterator
        assert gone() is None
    finally:
        gc.enable()


class Nobody:
    waiting = before_epoch = False

    def __getattr__(self, name):
        return lambda *_: None


def test_a_followed_loader_does_not_count_what_is_read_ahead():
    loader = DataLoader(ReadRows(), batch_size=2, num_workers=1)
    followed = FollowedLoader(loader, Nobody())
    followed.begin_epoch(0)
    iterator = iter(loader)
    assert why_not(loader, iterator) is None
    next(iterator)
    alone = followed.position(1)
    assert read_ahead(iterator).tolist() == [2, 3]
    assert str(followed.position(1)) == str(alone)
    assert next(iterator).tolist() == [2, 3]
    assert followed.position(2)["given"] == 2
    followed.release()
