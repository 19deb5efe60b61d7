import gc
import random
import weakref
from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from lightning_ups.transforms.resume import Progress, Resumption


def resumption(**options):
    return Resumption(**{"on_unreplayable": "refuse", **options})


def epoch(loaders, *, take, resume):
    """Take batches as a loop would, and return them and the state after the last."""
    loader = resume.follow([loaders])[0]
    resume.epoch()
    iterator = iter(loader)
    taken = resume.taken or 0
    batches = [next(iterator).tolist() for _ in range(take)]
    return batches, resume.state(Progress(taken=taken + take)), iterator


class ReadsAhead:
    """Holds a loader and reads some batches ahead of who asks."""

    def __init__(self, loader, depth):
        self.loader, self.depth = loader, depth

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        ahead, inner = [], iter(self.loader)
        for batch in inner:
            ahead.append(batch)
            if len(ahead) > self.depth:
                yield ahead.pop(0)
        yield from ahead


class Drawing:
    def __len__(self):
        return 30

    def __getitem__(self, index):
        return index + torch.rand(())


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("take", [1, 4, 9])
def test_what_was_read_ahead_is_read_again(depth, take):
    def make():
        return ReadsAhead(DataLoader(Drawing(), batch_size=2, shuffle=True), depth)

    torch.manual_seed(1)
    _, state, iterator = epoch(make(), take=take, resume=resumption())
    expected = [batch.tolist() for batch in iterator], torch.rand(()).item()
    torch.manual_seed(9)
    later = resumption()
    later.load([state], process=0)
    _, _, iterator = epoch(make(), take=0, resume=later)
    assert ([batch.tolist() for batch in iterator], torch.rand(()).item()) == expected


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")  # Python 3.12 says so of forks
def test_workers_that_lived_before_do_not_begin_anew():
    def make():
        loader = DataLoader(range(12), batch_size=2, shuffle=True, num_workers=1, persistent_workers=True)
        assert len([*loader]) == 6  # by the user, to look at the data, say
        return loader

    torch.manual_seed(1)
    _, state, iterator = epoch(make(), take=2, resume=resumption())
    expected = [batch.tolist() for batch in iterator]
    later = resumption()
    later.load([state], process=0)
    _, _, iterator = epoch(make(), take=0, resume=later)
    assert [batch.tolist() for batch in iterator] == expected


def test_other_samples_than_before_are_found():
    torch.manual_seed(1)
    _, state, _ = epoch(DataLoader(range(20), batch_size=2, shuffle=True), take=3, resume=resumption())
    later = resumption()
    later.load([state], process=0)
    with pytest.raises(ValueError, match=r"does not give the samples that it gave before the checkpoint"):
        epoch(DataLoader(range(21), batch_size=2, shuffle=True), take=1, resume=later)


class DrawsAsItGoes:
    """A sampler that draws from Python's generator for every sample."""

    def __iter__(self):
        for _ in range(20):
            yield random.randrange(20)

    def __len__(self):
        return 20


def test_a_sampler_whose_draws_mix_with_others_is_found():
    random.seed(1)
    resume = resumption()
    loader = resume.follow([DataLoader(range(20), batch_size=2, sampler=DrawsAsItGoes())])[0]
    resume.epoch()
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
        random.random()  # the training step
    state = resume.state(Progress(taken=3))
    later = resumption()
    later.load([state], process=0)
    with pytest.raises(ValueError, match="does not give the samples"):
        epoch(DataLoader(range(20), batch_size=2, sampler=DrawsAsItGoes()), take=1, resume=later)


def test_too_much_read_ahead_is_told():
    resume = resumption()
    epoch(DataLoader(range(200), batch_size=1), take=100, resume=resume)
    with pytest.raises(RuntimeError, match=r"Read fewer batches ahead\.$"):
        resume.state(Progress(taken=3))


def ranks_of(num, *, batch_size, samples=48):
    return [
        DataLoader(range(samples), batch_size, sampler=DistributedSampler(range(samples), num, rank, seed=3))
        for rank in range(num)
    ]


@pytest.mark.parametrize(("num", "batch_size"), [(4, 2), (2, 4), (1, 8), (8, 1), (2, 2), (1, 3)])
def test_another_number_of_ranks_goes_on_with_the_samples_that_are_left(num, batch_size):
    states, seen = [], set()
    for rank, loader in enumerate(ranks_of(4, batch_size=2)):
        resume = resumption(rank=rank, num_ranks=4)
        batches, state, _ = epoch(loader, take=3, resume=resume)
        states.append(state)
        seen |= {sample for batch in batches for sample in batch}
    assert len(seen) == 24
    left, skipped = [], []
    for rank, loader in enumerate(ranks_of(num, batch_size=batch_size)):
        resume = resumption(rank=rank, num_ranks=num)
        resume.load(states, process=rank)
        _, _, iterator = epoch(loader, take=0, resume=resume)
        skipped.append(resume.taken)
        left += [sample for batch in iterator for sample in batch.tolist()]
    whole_batches = 24 // (num * batch_size)
    assert skipped == [whole_batches] * num
    assert set(left) >= set(range(48)) - seen, "no sample is left out"
    assert len(left) == 48 - whole_batches * num * batch_size


@pytest.fixture
def no_collection():
    gc.disable()
    yield
    gc.enable()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")  # Python 3.12 says so of forks
@pytest.mark.parametrize("released", [False, True])
@pytest.mark.usefixtures("no_collection")
def test_workers_stop_with_the_last_reference(released):
    resume = resumption()
    _, _, iterator = epoch(DataLoader(range(20), batch_size=2, num_workers=1), take=2, resume=resume)
    gone = weakref.ref(iterator.inner)
    if released:
        resume.release()
    del iterator
    assert gone() is None


class Held(list):
    """A dataset that weak references know."""


class Stateful:
    """A loader of a class of its own."""

    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return map(torch.tensor, self.data)

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
@pytest.mark.parametrize(
    "loader",
    [DataLoader, partial(DataLoader, num_workers=1, persistent_workers=True), Stateful],
    ids=["stock", "with workers that live on", "of another class"],
)
@pytest.mark.usefixtures("no_collection")
def test_a_loader_goes_with_its_last_reference_once_it_is_released(loader):
    data, resume = Held(range(3)), resumption()
    gone = weakref.ref(data)
    epoch(loader(data), take=3, resume=resume)
    del data
    assert gone() is not None
    resume.release()
    assert gone() is None
