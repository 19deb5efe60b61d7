import json
from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from lightning_ups.state.checkpoint import Saver, is_complete, meta
from lightning_ups.state.checkpoint.consolidation import consolidated
from lightning_ups.state.checkpoint.loading import load, load_weights
from lightning_ups.state.checkpoint.saving import described, gathered, numbered, save_sharded
from lightning_ups.state.checkpoint.state import named_state


def test_numbers_are_those_of_the_optimizer():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    stock, ours = optimizer.state_dict(), numbered(named_state(model, optimizer))
    assert ours["param_groups"] == stock["param_groups"]
    assert list(ours["state"]) == [0, 1]
    assert torch.equal(ours["state"][1]["exp_avg"], stock["state"][1]["exp_avg"])


def test_what_resuming_can_do_without_lies_apart(tmp_path):
    checkpoint = {"state_dict": {"w": torch.ones(2)}, "hyper_parameters": {"a": object}, "loops": 3, "epoch": 1}
    save_sharded(Saver(asynchronous=False), checkpoint, tmp_path / "c", apart=("hyper_parameters",))
    assert is_complete(tmp_path / "c")
    assert meta.loaded(tmp_path / "c" / "meta.pt")[0] == {"loops": 3, "epoch": 1}
    assert (tmp_path / "c" / "apart.pt").exists()
    assert set(checkpoint) == {"state_dict", "hyper_parameters", "loops", "epoch"}, "the caller's dict is the caller's"


class Counting(nn.Linear):
    """Keeps a dict beside its weights, and an empty one within."""

    def __init__(self):
        super().__init__(2, 2)
        self.seen = {"calls": 0, "by": {}}

    def get_extra_state(self):
        return self.seen

    def set_extra_state(self, state):
        self.seen = state


def test_what_modules_keep_beside_their_weights_comes_back_whole(tmp_path):
    saved, again, weights = Counting(), Counting(), Counting()
    saved.seen = {"calls": 3, "by": {}}
    save_sharded(Saver(asynchronous=False), {"state_dict": saved.state_dict(), "epoch": 1}, tmp_path / "c")
    rest, _ = load(tmp_path / "c", module=again, optimizers=[])
    load_weights(weights, tmp_path / "c")
    assert again.seen == weights.seen == consolidated(tmp_path / "c")[0]["state_dict"]["_extra_state"] == saved.seen
    assert rest == {"epoch": 1}


def whole_on_the_first():
    mesh = init_device_mesh("cpu", (2,))
    weight = distribute_tensor(torch.arange(6.0).reshape(3, 2), mesh, [Shard(0)])
    tree = gathered({"a": [weight, 3], "b": torch.ones(1)})
    if mesh.get_local_rank() == 1:
        return tree == {"a": [None, 3], "b": None}
    return tree["a"][0].tolist(), tree["a"][1], tree["b"].tolist()


def test_gathered_is_whole_on_the_first_rank(ranks):
    assert ranks(whole_on_the_first) == ([[0, 1], [2, 3], [4, 5]], 3, [1])


def averaged_weights(path):
    mesh = init_device_mesh("cpu", (2,))
    module = nn.Linear(2, 3, bias=False)
    module.weight = nn.Parameter(distribute_tensor(torch.ones(3, 2), mesh, [Shard(0)]))
    average = distribute_tensor(torch.arange(6.0).reshape(3, 2), mesh, [Shard(0)])
    callbacks = {"average": OrderedDict({"weight": average, "odd": average * 2}), "steps": (1, [2])}
    saver = Saver(asynchronous=False)
    save_sharded(saver, {"state_dict": module.state_dict(), "callbacks": callbacks}, path / "c")
    rest, _ = load(path / "c", module=module, optimizers=[], group=saver.group)
    saver.close()
    back = rest["callbacks"]["average"]
    assert rest["callbacks"]["steps"] == (1, [2])
    return type(back["weight"]).__name__, back["weight"].full_tensor().tolist(), back["odd"].shape


def test_sharded_tensors_of_callbacks_are_saved_sharded(ranks, tmp_path):
    kind, values, shape = ranks(averaged_weights, tmp_path)
    assert kind == "DTensor", "laid out like the parameter of its name"
    assert values == [[0, 1], [2, 3], [4, 5]]
    assert shape == (3, 2)


@dataclass
class Config:
    width: int = 3


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.config = Config()
        self.part = nn.Linear(1, 1)
        self.part.config = Config(9)


class Odd(nn.Module):
    config = object()


def test_outermost_models_say_their_config():
    module = nn.ModuleDict({"model": Inner(), "odd": Odd(), "plain": nn.Linear(1, 1)})
    found = described(module)
    assert list(found) == ["model"]
    assert found["model"]["class"].endswith("test_saving.Inner")
    assert json.loads(found["model"]["config"]) == {"width": 3}
