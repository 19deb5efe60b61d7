import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_ups.optim.partitioned import PartitionedOptimizer


def model():
    torch.manual_seed(0)
    made = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 8), nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)])
    made.turns = nn.Parameter(torch.randn(3, dtype=torch.complex64))
    made.low = nn.Parameter(torch.randn(5, dtype=torch.bfloat16))
    made.frozen = nn.Parameter(torch.randn(2), requires_grad=False)
    return made


def give_gradients(module, step):
    torch.manual_seed(step)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn_like(parameter)


def steps(kind):
    stock, ours = model(), model()
    right, inner = (kind(each.parameters()) for each in (stock, ours))
    optimizer = PartitionedOptimizer(inner)
    held = [len(inner.state)]
    for step in range(3):
        for module, each in ((stock, right), (ours, optimizer)):
            give_gradients(module, step)
            each.step()
        held.append(len(inner.state))
    for one, other in zip(ours.parameters(), stock.parameters(), strict=True):
        assert torch.equal(one, other)
    optimizer.consolidate_state_dict()
    saved = [optimizer.state_dict()]
    dist.broadcast_object_list(saved)
    assert repr(saved[0]) == repr(right.state_dict())
    loaded = PartitionedOptimizer(kind(ours.parameters()))
    loaded.load_state_dict(saved[0])
    assert loaded.state.keys() == inner.state.keys()
    give_gradients(ours, 4)
    give_gradients(stock, 4)
    loaded.step()
    right.step()
    assert all(torch.equal(*pair) for pair in zip(ours.parameters(), stock.parameters(), strict=True))
    return held, len(right.state)


KINDS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad([q for q in p if not q.is_complex()], lr=0.1),
}


def stepped(name):
    return steps(KINDS[name])


@pytest.mark.parametrize("name", KINDS)
def test_it_steps_as_the_optimizer_inside_and_holds_a_part_of_the_state(ranks, name):
    held, whole = ranks(stepped, name)
    assert 0 < held[-1] < whole
    assert held[0] in (0, held[-1], held[-1] + 1)  # Adagrad's is there from the beginning, with that of frozen ones


def grown():
    module = model()
    optimizer = PartitionedOptimizer(torch.optim.AdamW(module[0].parameters()))
    optimizer.add_param_group({"params": [*module[1].parameters()], "lr": 0.5})
    give_gradients(module, 0)
    optimizer.step()
    optimizer.param_groups = optimizer.param_groups[:1]
    optimizer.step()
    return len(optimizer.param_groups), len(optimizer.state)


def test_groups_can_be_added_and_replaced(ranks):
    assert ranks(grown) == (1, 2)


def refused():
    module = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="LBFGS does not step each parameter by itself"):
        PartitionedOptimizer(torch.optim.LBFGS(module.parameters()))
    with pytest.raises(TypeError, match="AdamW can be neither copied nor pickled"):
        copy.deepcopy(PartitionedOptimizer(torch.optim.AdamW(module.parameters())))


def test_what_cannot_be_split_is_refused(ranks):
    ranks(refused)
