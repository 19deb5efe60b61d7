import pytest
import torch
from torch import nn

from lightning_ups.order import check_live, uncovered


def test_live_parameters_pass_and_a_partial_optimizer_too():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    check_live(model, [torch.optim.SGD(model[0].parameters(), lr=0.1)])
    assert uncovered(model, [torch.optim.SGD(model[0].parameters(), lr=0.1)]) == ["1.weight", "1.bias"]


def test_replaced_parameters_are_refused():
    model = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[0] = nn.Linear(2, 2)
    with pytest.raises(
        ValueError, match=r"(?s)2 of the optimizer's parameters.*0\.weight.*Create the optimizer in configure"
    ):
        check_live(model, [optimizer])


def test_a_parameter_kept_outside_the_module_is_not_dead():
    model, temperature = nn.Linear(2, 2), nn.Parameter(torch.zeros(1))
    check_live(model, [torch.optim.SGD([*model.parameters(), temperature], lr=0.1)])
    check_live(model, [torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)])


def test_a_frozen_parameter_is_not_missed():
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    assert uncovered(model, [torch.optim.SGD([model.weight], lr=0.1)]) == []
