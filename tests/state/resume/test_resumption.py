import warnings

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_ups.state.resume import Progress, Resumption


def numbers():
    yield from range(5)


class Once:
    def __iter__(self):
        return numbers()


def test_what_cannot_be_replayed_is_told_once():
    resume = Resumption(on_unreplayable="warn")
    with pytest.warns(UserWarning, match=r"Once cannot skip samples and has no state.*from the sample's index\.$"):
        resume.follow([Once()])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resume.review()


def test_or_refused_before_the_first_batch():
    with pytest.raises(ValueError, match=r"Once cannot skip.*or set on_unreplayable='warn'\.$"):
        Resumption(on_unreplayable="refuse").follow([Once()])


def test_a_save_within_an_accumulation_is_told():
    resume = Resumption(on_unreplayable="warn")
    with pytest.warns(UserWarning, match="gradients of this accumulation so far"):
        resume.state(Progress(taken=0, accumulating=True))


def test_what_was_saved_before_there_was_a_loader_begins_at_the_beginning():
    state = Resumption(on_unreplayable="warn").state(Progress(taken=0))
    later = Resumption(on_unreplayable="refuse")
    later.load([state], process=0)
    (stand_in,) = later.follow([DataLoader(range(3))])
    assert [batch.item() for batch in stand_in] == [0, 1, 2]


def test_fewer_loaders_than_positions():
    resume = Resumption(on_unreplayable="warn")
    resume.follow([DataLoader(range(3)), DataLoader(range(3))])
    state = resume.state(Progress(taken=0))
    later = Resumption(on_unreplayable="warn")
    later.load([state], process=0)
    with pytest.raises(ValueError, match="positions of 2 training loaders, and there are 1"):
        later.follow([DataLoader(range(3))])


class Drawing:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.rand(())


@pytest.mark.parametrize("policy", ["warn", "refuse"])
def test_workers_that_draw_are_told_by_the_second_batch(policy):
    resume = Resumption(on_unreplayable=policy)
    loader = resume.follow([DataLoader(Drawing(), num_workers=1)])[0]
    resume.epoch()
    iterator = iter(loader)
    next(iterator)
    match = "the workers of DataLoader of Drawing draw random numbers"
    with pytest.warns(UserWarning, match=match) if policy == "warn" else pytest.raises(ValueError, match=match):
        next(iterator)


def test_a_process_that_is_new_draws_its_own_numbers():
    torch.manual_seed(0)
    state = Resumption(on_unreplayable="warn").state(Progress(taken=0, epoch_over=True))
    drawn = []
    for process in (0, 1):
        resume = Resumption(on_unreplayable="warn", rank=process, num_ranks=2)
        resume.load([state], process=process)
        resume.begin()
        resume.begin_epoch()
        drawn.append(torch.rand(()).item())
    torch.manual_seed(0)
    assert drawn[0] == torch.rand(()).item()
    assert drawn[1] != drawn[0]
