import warnings

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_ups.state.resume import Connection, Resumption
from tests.toys import Net, data, trainer


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
        resume.state(taken=0, accumulating=True)


def test_what_was_saved_before_there_was_a_loader_begins_at_the_beginning():
    state = Resumption(on_unreplayable="warn").state(taken=0)
    later = Resumption(on_unreplayable="refuse")
    later.load([state], process=0)
    (stand_in,) = later.follow([DataLoader(range(3))])
    assert [batch.item() for batch in stand_in] == [0, 1, 2]


def test_fewer_loaders_than_positions():
    resume = Resumption(on_unreplayable="warn")
    resume.follow([DataLoader(range(3)), DataLoader(range(3))])
    state = resume.state(taken=0)
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
    state = Resumption(on_unreplayable="warn").state(taken=0, epoch_over=True)
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


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_run_tells_its_position_and_is_left_as_it_was(tmp_path):
    run, model, states = trainer(tmp_path, epochs=1), Net(), []
    connection = Connection(run, on_unreplayable="refuse")
    model.on_train_batch_end = lambda *_: states.append(connection.state()["ranks"][0])
    loader = DataLoader(data(), batch_size=2, shuffle=True)
    run.fit(model, loader)
    assert [state["taken"] for state in states] == [1, 2, 3, 4]
    assert [state["loaders"][0]["given"] for state in states[:3]] == [1, 2, 3]
    assert states[3]["loaders"] is None, "the epoch is over"
    connection.close()
    assert type(loader) is DataLoader


MESSAGE = "You're resuming from a checkpoint that ended before the epoch"


def resumed(tmp_path, *, fail):
    """Return what is warned of by a run that resumes within an epoch, while it runs and afterwards."""
    whole = trainer(tmp_path, epochs=1)
    model, states = Net(), []
    first = Connection(whole, on_unreplayable="refuse")

    def save(*_):
        states.append(first.state())
        whole.save_checkpoint(tmp_path / f"{len(states)}.ckpt")

    model.on_train_batch_end = save
    whole.fit(model, DataLoader(data(), batch_size=2, shuffle=True))
    first.close()
    run = trainer(tmp_path, epochs=1)
    connection = Connection(run, on_unreplayable="refuse")
    model = Net(fail=fail)
    model.on_load_checkpoint = lambda *_: connection.load(states[1])
    model.on_train_start = connection.begin
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        before = [*warnings.filters]
        try:
            run.fit(
                model, DataLoader(data(), batch_size=2, shuffle=True), ckpt_path=tmp_path / "2.ckpt", weights_only=False
            )
        except RuntimeError as error:
            assert str(error) == "stop here"  # noqa: PT017
        finally:
            connection.close()
        after = [*warnings.filters]
        warnings.warn(MESSAGE, UserWarning, stacklevel=1)
    return before, after, [str(w.message)[: len(MESSAGE)] for w in said].count(MESSAGE)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("fail", [False, True])
def test_what_it_makes_untrue_is_not_warned_of_while_it_runs_and_may_be_afterwards(tmp_path, fail):
    before, after, warned = resumed(tmp_path, fail=fail)
    assert after == before
    assert warned == 1  # by this test


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_filter_that_the_user_has_already_stays(tmp_path, monkeypatch):
    real = warnings.simplefilter
    monkeypatch.setattr(
        warnings, "simplefilter", lambda action: (real(action), warnings.filterwarnings("ignore", MESSAGE))
    )
    before, after, warned = resumed(tmp_path, fail=False)
    assert after == before
    assert warned == 0
