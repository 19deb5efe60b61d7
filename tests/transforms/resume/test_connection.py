import pytest
from torch.utils.data import DataLoader

from lightning_ups.transforms.resume import Connection
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
