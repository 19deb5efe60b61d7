import gc
import random
import weakref
from functools import partial

import pytest
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

from lightning_ups.state.resume import Resumption


def resumption(**options):
    return Resumption(**{"on_unreplayable": "refuse", **options})


def epoch(loaders, *, take, resume):
    """Take batches as a loop would, and return them and the state after the last."""
    loader = resume.follow([loaders])[0]
    resume.epoch()
    iterator = iter(loader)
    taken = resume.taken or 0
    batches = [next(iterator).tolist() for _ in range(take)]
    return batches, resume.state(taken=taken + take), iterator


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


@pytest.mark.parametrize("take", [3, 4, 5, 6, 9])
def test_a_loader_whose_end_was_read_ahead_has_its_generator_as_it_was(take):
    def make():
        generator = torch.Generator().manual_seed(3)  # from which its sampler draws at its end, too
        return ReadsAhead(DataLoader(range(12), batch_size=2, shuffle=True, generator=generator), 2), generator

    def rest(resume, iterator, loader, generator):
        batches = [batch.tolist() for batch in iterator]
        resume.epoch()
        return batches, [batch.tolist() for batch in loader], generator.get_state().tolist()

    loader, generator = make()
    resume = resumption()
    _, _, iterator = epoch(loader, take=min(take, 6), resume=resume)
    if take > 6:
        assert next(iterator, None) is None
    state = resume.state(taken=take)  # more than it has, where other loaders go on
    expected = rest(resume, iterator, loader, generator)
    later = resumption()
    later.load([state], process=0)
    loader, generator = make()
    _, _, iterator = epoch(loader, take=0, resume=later)
    assert rest(later, iterator, loader, generator) == expected


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
    state = resume.state(taken=3)
    later = resumption()
    later.load([state], process=0)
    with pytest.raises(ValueError, match="does not give the samples"):
        epoch(DataLoader(range(20), batch_size=2, sampler=DrawsAsItGoes()), take=1, resume=later)


def test_too_much_read_ahead_is_told():
    resume = resumption()
    epoch(DataLoader(range(200), batch_size=1), take=100, resume=resume)
    with pytest.raises(RuntimeError, match=r"Read fewer batches ahead\.$"):
        resume.state(taken=3)


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


class Wrapper(DistributedSamplerWrapper):
    """As Lightning wraps a sampler that it does not know."""

    def __init__(self, data, *ranks, **options):
        super().__init__(RandomSampler(data), *ranks, **options)


class SeededForGood(DistributedSampler):
    """A sampler whose seed cannot be put back."""

    def __init__(self, data, *ranks, seed):
        self._own = seed
        super().__init__(data, *ranks)

    seed = property(lambda self: self._own, lambda self, seed: self._refuse(seed))

    def _refuse(self, seed):
        if seed != 0:  # torch's default
            raise AttributeError(seed)


class OfNoKind:
    """A seeded sampler that is not torch's."""

    def __init__(self, data, *_, seed):
        self.seed, self.data = seed, data

    def __iter__(self):
        return iter(random.Random(self.seed).sample(self.data, len(self.data)))

    def __len__(self):
        return len(self.data)


def seeded(seed, kind=DistributedSampler, num=1):
    return DataLoader(range(20), batch_size=2, sampler=kind(range(20), num, 0, seed=seed))


def saved(loader, *, over, **ranks):
    """Return the state after three batches, of which it may be said that they were all."""
    resume = resumption(**ranks)
    _, state, _ = epoch(loader, take=3, resume=resume)
    return resume.state(taken=3, epoch_over=True) if over else state


def read_on(state, loader, **options):
    """Return what a run from ``state`` reads to the end of its first epoch."""
    later = resumption(**options)
    later.load([state], process=0)
    followed = later.follow([loader])[0]
    later.begin()
    later.epoch()
    later.begin_epoch()
    return [batch.tolist() for batch in followed]


KINDS = [DistributedSampler, Wrapper, UnrepeatedDistributedSampler]


@pytest.mark.parametrize("over", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_seed_of_a_distributed_sampler_is_taken_up(kind, over):
    state = saved(seeded(1, kind), over=over)
    assert read_on(state, seeded(77, kind)) == read_on(state, seeded(1, kind))


@pytest.mark.parametrize("over", [False, True])
def test_the_seed_is_taken_up_on_another_number_of_ranks(over):
    state = saved(seeded(1, num=2), over=over, num_ranks=2)
    assert read_on(state, seeded(77)) == read_on(state, seeded(1))


def test_loaders_that_are_made_anew_get_the_seed_that_was_taken_up():
    state, later = saved(seeded(1), over=False), resumption()
    later.load([state], process=0)
    seeds = []
    for loader in (seeded(77), seeded(77), seeded(5)):  # the last is seeded by itself
        later.follow([loader])
        seeds.append(loader.sampler.seed)
    assert seeds == [1, 1, 5]


IN_ORDER = partial(DataLoader, range(20), batch_size=2)
OTHERS = {
    "shuffled, in order": (
        seeded(1),
        IN_ORDER,
        r"by SequentialSampler and not by DistributedSampler\(shuffle=True, seed=1",
    ),
    "in order, shuffled": (
        IN_ORDER(),
        partial(seeded, 1),
        r"by DistributedSampler\(shuffle=True, seed=1\) and not by Seq",
    ),
    "for good": (seeded(1, SeededForGood), partial(seeded, 77, SeededForGood), r"seed=77\) and not by .*seed=1\)"),
    "of no kind": (seeded(1, OfNoKind), partial(seeded, 77, OfNoKind), r"OfNoKind\(seed=77\) and not by .*seed=1\)"),
}


@pytest.mark.parametrize("before", [1, 2])
@pytest.mark.parametrize("over", [False, True])
@pytest.mark.parametrize("case", OTHERS)
def test_another_order_is_told_once_with_its_cause_and_cure(case, over, before):
    loader, make, reason = OTHERS[case]
    state = saved(loader, over=over, num_ranks=before)
    with pytest.warns(
        UserWarning, match=rf"DataLoader of range gives its samples.*{reason}.*on one device, too"
    ) as told:
        read_on(state, make(), on_unreplayable="warn")
    assert len(told) == 1
    with pytest.raises(ValueError, match=rf"{reason}.*or set on_unreplayable='warn'\.$"):
        read_on(state, make())


class WithAState(DataLoader):
    """A loader whose state may hold a sampler's seed, too."""

    def state_dict(self):
        return {"seed": self.sampler.seed}

    def load_state_dict(self, state):
        self.sampler.seed = state["seed"]


@pytest.mark.parametrize("over", [False, True])
def test_the_order_of_a_loader_with_a_state_is_its_own(over):
    def make(seed):
        return WithAState(range(20), batch_size=2, sampler=OfNoKind(range(20), seed=seed))

    state = saved(make(1), over=over)
    assert read_on(state, make(77)) == read_on(state, make(1))


@pytest.mark.parametrize("over", [False, True])
def test_samples_in_order_are_in_order_under_any_strategy(over):
    ranks = DataLoader(range(20), batch_size=2, sampler=DistributedSampler(range(20), 2, 0, shuffle=False))
    state = saved(ranks, over=over, num_ranks=2)
    left = read_on(state, DataLoader(range(20), batch_size=4))
    assert left[0] == ([0, 1, 2, 3] if over else [12, 13, 14, 15])


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


@pytest.mark.parametrize("over", [False, True])
def test_a_checkpoint_from_before_seeds_were_kept_is_taken_up(over):
    state = saved(seeded(1), over=over)
    expected = read_on(state, seeded(1))
    for position in state["ends"] if over else state["loaders"]:
        position.pop("order", None)
    assert read_on(state, seeded(1)) == expected
