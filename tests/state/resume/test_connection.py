import warnings

import pytest
from torch.utils.data import DataLoader

from lightning_ups.state.resume import Connection
from tests.toys import Net, data, trainer


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
