import torch
from torch import nn

from lightning_ups.state.guard import Saved, layout_of


def whole(folder, name):
    torch.save({"state": 1}, folder / name)
    return folder / name


def test_the_layout_is_the_number_of_parameters_in_each_group():
    weights = [nn.Parameter(torch.ones(1)) for _ in range(3)]
    optimizer = torch.optim.SGD(weights[:2], lr=0.1)
    assert layout_of([optimizer]) == ((2,),)
    optimizer.add_param_group({"params": weights[2:]})
    assert layout_of([optimizer, torch.optim.SGD(weights, lr=0.1)]) == ((2, 1), (3,))


def test_the_newest_that_is_whole_and_fits(tmp_path):
    saved, one, two = Saved(), ((2,),), ((2, 1),)
    for step, layout in ((1, one), (2, one), (3, two), (5, two)):
        saved.add(whole(tmp_path, f"{step}"), step=step, layout=layout)
    assert saved.newest(step=4, layout=two) == tmp_path / "3"
    assert saved.newest(step=4, layout=one) == tmp_path / "2"
    assert saved.newest(step=2, layout=two) is None
    assert saved.others(step=2, layout=two) == [tmp_path / "1", tmp_path / "2"]
    assert saved.others(step=4, layout=one) == [tmp_path / "3"]
    (tmp_path / "2").unlink()
    assert saved.newest(step=4, layout=one) == tmp_path / "1"


def test_what_is_saved_again_under_a_name_is_no_longer_what_it_was(tmp_path):
    saved, layout = Saved(), ((1,),)
    saved.add(whole(tmp_path, "last"), step=1, layout=layout)
    saved.add(tmp_path / "last", step=4, layout=layout)
    assert saved.newest(step=3, layout=layout) is None
    saved.forget(tmp_path / "last")
    assert saved.newest(step=9, layout=layout) is None


def test_what_comes_after_a_step_is_undone(tmp_path):
    saved, layout = Saved(), ((1,),)
    for step in (1, 4, 5):
        saved.add(whole(tmp_path, f"{step}"), step=step, layout=layout)
    (tmp_path / "5").unlink()
    assert saved.undo(step=3) == [tmp_path / "4"]
    assert saved.undo(step=3) == []
    assert saved.newest(step=9, layout=layout) == tmp_path / "1"
