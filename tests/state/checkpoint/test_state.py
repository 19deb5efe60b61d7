import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

from lightning_ups.state.checkpoint import Saver, save_sharded
from lightning_ups.state.checkpoint.consolidation import consolidated
from lightning_ups.state.checkpoint.state import named_state, restore, restore_numbered


def two_groups(reverse=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    groups = [{"params": list(model[0].parameters())}, {"params": [model[1].weight], "lr": 0.5}]
    return model, torch.optim.AdamW(groups[::-1] if reverse else groups, lr=0.1)


def step(model, optimizer):
    model[1](model[0](torch.ones(4, 3))).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_state_lies_under_names():
    model, optimizer = two_groups()
    step(model, optimizer)
    state = named_state(model, optimizer)
    assert set(state["state"]) == {"0.weight", "0.bias", "1.weight"}
    assert [group["params"] for group in state["param_groups"]] == [["0.weight", "0.bias"], ["1.weight"]]
    assert state["param_groups"][1]["lr"] == 0.5
    assert state["state"]["0.weight"]["exp_avg"] is optimizer.state[model[0].weight]["exp_avg"]


def test_a_round_trip_trains_on_alike():
    model, optimizer = two_groups()
    step(model, optimizer)
    other_model, other = two_groups()
    other_model.load_state_dict(model.state_dict())
    restore(other_model, other, copy.deepcopy(named_state(model, optimizer)))
    step(model, optimizer)
    step(other_model, other)
    assert torch.equal(model[0].weight, other_model[0].weight)


def test_other_groups_are_refused_by_name():
    model, optimizer = two_groups()
    step(model, optimizer)
    saved = named_state(model, optimizer)
    with pytest.raises(ValueError, match=r"in another order.*as it was built when the checkpoint was saved, or"):
        restore(*two_groups(reverse=True), saved)
    model, _ = two_groups()
    with pytest.raises(ValueError, match=r"1.weight only in the checkpoint\..*load_weights"):
        restore(model, torch.optim.SGD(model[0].parameters(), lr=1), saved)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("saved_by", "now", "lacking"),
    [
        (momentum, torch.optim.Adam, "betas, eps"),
        (torch.optim.AdamW, momentum, "momentum, dampening"),
        (torch.optim.AdamW, torch.optim.RMSprop, "alpha"),
    ],
    ids=["SGD, now Adam", "AdamW, now SGD", "AdamW, now RMSprop"],
)
def test_the_state_of_another_optimizer_is_refused(saved_by, now, lacking):
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    optimizer = saved_by(model.parameters())
    step(model, optimizer)
    told = rf"saved by another optimizer than {type(now(model.parameters())).__name__}: .* no {lacking}, .*load_weights"
    with pytest.raises(ValueError, match=told):
        restore(model, now(model.parameters()), named_state(model, optimizer))


def test_parameters_of_another_module_are_refused():
    _, optimizer = two_groups()
    with pytest.raises(ValueError, match=r"Build the optimizer from the module's parameters"):
        named_state(nn.Linear(2, 2), optimizer)


def test_a_numbered_state_gets_names():
    model, optimizer = two_groups()
    step(model, optimizer)
    names = [["0.weight", "0.bias"], ["1.weight"]]
    tree = restore_numbered(names, optimizer.state_dict())
    assert set(tree["state"]) == {"0.weight", "0.bias", "1.weight"}
    with pytest.raises(ValueError, match=r"groups of \[2, 1\] parameters, and this one has groups of \[3\]"):
        restore_numbered([["a", "b", "c"]], optimizer.state_dict())


class LocalMomentum(torch.optim.Optimizer):
    """Keeps its state for the local part of a parameter, as a plain tensor."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                local, state = p.to_local(), self.state[p]
                state.setdefault("m", torch.zeros_like(local)).add_(local)
                state["whole"] = torch.tensor([1.0, 2.0, 3.0])


def local_state():
    mesh = init_device_mesh("cpu", (2,))
    module = nn.Linear(2, 6, bias=False)
    full = torch.arange(12.0).reshape(6, 2)
    module.weight = nn.Parameter(distribute_tensor(full, mesh, [Shard(0)]))
    optimizer = LocalMomentum(module.parameters())
    optimizer.step()
    saved = named_state(module, optimizer)
    m = saved["state"]["weight"]["m"]
    assert isinstance(m, DTensor)
    assert torch.equal(m.full_tensor(), full)
    fresh = LocalMomentum(module.parameters())
    restore(module, fresh, saved)
    state = fresh.state[module.weight]
    return type(state["m"]).__name__, torch.equal(state["m"], module.weight.to_local()), state["whole"].tolist()


class LocalPast(LocalMomentum):
    """Keeps several of them, in a list."""

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("past", []).append(p.to_local().clone())


class LocalPairs(LocalMomentum):
    """Keeps pairs of them, in a tuple."""

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            local = p.to_local()
            self.state[p]["past"] = (*self.state[p].get("past", ()), (local.clone(), 2 * local))


def local_tuples(path):
    module = nn.Linear(2, 6, bias=False)
    full = torch.arange(12.0).reshape(6, 2)
    module.weight = nn.Parameter(distribute_tensor(full, init_device_mesh("cpu", (2,)), [Shard(0)]))
    optimizer, saver = LocalPairs(module.parameters()), Saver(asynchronous=False)
    optimizer.step()
    checkpoint = {"state_dict": module.state_dict(), "optimizer_states": [named_state(module, optimizer)]}
    save_sharded(saver, checkpoint, path)
    saver.close()
    whole = consolidated(path)[0]["optimizer_states"][0]["state"][0]["past"]
    return str(whole) == str(((full, 2 * full),))


def test_tuples_of_state_of_the_local_part_are_saved_whole(ranks, tmp_path):
    assert ranks(local_tuples, tmp_path / "c")


def local_list():
    module = nn.Linear(2, 6, bias=False)
    full = torch.arange(12.0).reshape(6, 2)
    module.weight = nn.Parameter(distribute_tensor(full, init_device_mesh("cpu", (2,)), [Shard(0)]))
    optimizer = LocalPast(module.parameters())
    for _ in range(2):
        optimizer.step()
    saved = named_state(module, optimizer)
    whole = [part.full_tensor().tolist() for part in saved["state"]["weight"]["past"]]
    fresh = LocalPast(module.parameters())
    restore(module, fresh, saved)
    kept = [(type(part).__name__, part.tolist()) for part in fresh.state[module.weight]["past"]]
    return whole == [full.tolist()] * 2 and kept == [("Tensor", full[:3].tolist())] * 2


def test_a_list_of_state_of_the_local_part_too(ranks):
    assert ranks(local_list)


def test_state_of_the_local_part_is_sharded_in_a_checkpoint(ranks):
    assert ranks(local_state) == ("Tensor", True, [1, 2, 3])
