import copy

import pytest
import torch
from torch import nn

from lightning_ups.optim import (
    MasteredOptimizer,
    MasterWeights,
    check_options,
    go_by_the_name_of,
    refuse_state_of_others,
)

FILLED = ("foreach", "maximize", "capturable", "differentiable", "fused", "amsgrad", "decoupled_weight_decay")


def saved(kind=torch.optim.AdamW, **options):
    model = nn.Linear(2, 2)
    optimizer = kind(model.parameters(), lr=0.1, **options)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return optimizer.state_dict()


def test_what_torch_fills_in_for_an_older_checkpoint_may_be_missing():
    groups = saved()["param_groups"]
    for name in FILLED:
        del groups[0][name]
    optimizer = torch.optim.AdamW(nn.Linear(2, 2).parameters())
    before = copy.deepcopy(optimizer.state_dict())
    check_options(optimizer, groups)
    assert optimizer.state_dict() == before
    assert not set(FILLED) & groups[0].keys(), "nor are the saved ones changed"


class Steady(torch.optim.SGD):
    """Has no option of its own to dampen by."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        del self.param_groups[0]["dampening"]

    def step(self, closure=None):
        """Do nothing."""


@pytest.mark.parametrize(
    ("kind", "missing"),
    [
        (torch.optim.AdamW, None),
        (Steady, None),
        (torch.optim.Adagrad, "initial_accumulator_value"),
        (Steady, "momentum"),
    ],
)
def test_its_own_are_enough_and_what_it_has_not_itself_or_is_new_may_be_missing(kind, missing):
    groups = saved(kind)["param_groups"]
    groups[0].pop(missing, None)
    check_options(kind(nn.Linear(2, 2).parameters(), lr=1), groups)


@pytest.mark.parametrize("mastered", [False, True])
def test_an_optimizer_refuses_the_state_of_another_before_it_takes_any(mastered):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    if mastered:
        optimizer = MasteredOptimizer(optimizer, MasterWeights(model, dtype=torch.bfloat16))
    for _ in range(2):
        refuse_state_of_others([optimizer])
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(
        ValueError, match=r"another optimizer than Adam: .* no betas, eps, .*the optimizer that saved it"
    ):
        optimizer.load_state_dict(saved(torch.optim.SGD, momentum=0.9))
    assert optimizer.state_dict() == before
    optimizer.load_state_dict(saved(torch.optim.Adam))


def test_one_class_for_each_name_which_is_still_ours():
    made = []
    for kind in (torch.optim.AdamW, torch.optim.AdamW, torch.optim.SGD):
        model = torch.nn.Linear(2, 2)
        known = kind(model.parameters(), lr=0.1)
        made.append(MasteredOptimizer(known, MasterWeights(model, dtype=torch.bfloat16)))
        go_by_the_name_of(known, made[-1])
    assert [type(ours).__name__ for ours in made] == ["AdamW", "AdamW", "SGD"]
    assert type(made[0]) is type(made[1])
    assert all(isinstance(ours, MasteredOptimizer) for ours in made)
