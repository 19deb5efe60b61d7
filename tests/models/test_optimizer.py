import math

import pytest
import torch
from torch import nn

from lightning_ups.models.optimizer import adamw, factor, muon, scheduler


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.RMSNorm(4)
        self.b.weight = self.a.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)


def test_decay_shrinks_matrices_and_nothing_else():
    model = Tied()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = adamw(model, lr=0.1, betas=(0.9, 0.95), weight_decay=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        expected = before[name] * (0.95 if name == "a.weight" else 1.0)
        torch.testing.assert_close(parameter.detach(), expected)


def test_fused_on_cpu_and_left_to_torch_elsewhere():
    assert adamw(Tied(), lr=0.1, betas=(0.9, 0.95), weight_decay=0.5).defaults["fused"] is True
    assert adamw(Tied().to("meta"), lr=0.1, betas=(0.9, 0.95), weight_decay=0.5).defaults["fused"] is False
    assert adamw(Tied(), lr=0.1, betas=(0.9, 0.95), weight_decay=0.5, fused=False).defaults["fused"] is False


def test_muon_trains_the_matrices_of_hidden_layers():
    model = Tied()
    optimizer = muon(model, lr=0.1, betas=(0.9, 0.95), weight_decay=0.5)
    (matrices, vectors) = optimizer.param_groups
    assert [*map(id, matrices["params"])] == [id(model.a.weight)]
    assert [*map(id, vectors["params"])] == [id(model.a.bias), id(model.norm.weight)]
    assert (matrices["weight_decay"], vectors["weight_decay"], vectors["fused"]) == (0.5, 0.0, True)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Conv1d(4, 4, 3))
    optimizer = muon(model, lr=0.1, betas=(0.9, 0.95), weight_decay=0.5, outer=[model[0]])
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 2, 3]
    assert optimizer.param_groups[0]["params"] == [model[1].weight]


RULE = {"warmup_steps": 4, "total_steps": 20, "final_fraction": 0.1, "decay_fraction": 0.25}


def curve(schedule):
    return [factor(step, schedule=schedule, **RULE) for step in range(21)]


def test_all_rise_linearly_and_never_start_at_zero():
    for schedule in ("cosine", "wsd", "constant"):
        assert curve(schedule)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_cosine_is_half_way_in_the_middle_and_ends_low():
    values = curve("cosine")
    assert values[12] == pytest.approx(0.55)
    assert values[8] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)
    assert values[20] == pytest.approx(0.1)
    assert values[4:] == sorted(values[4:], reverse=True)


def test_wsd_is_level_and_falls_in_a_line():
    values = curve("wsd")
    assert values[4:16] == [1.0] * 12
    assert values[16:] == pytest.approx([0.82, 0.64, 0.46, 0.28, 0.1])


def test_scheduler_sets_the_rates_and_resumes():
    def make():
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
        return optimizer, scheduler(optimizer, schedule="cosine", **RULE)

    optimizer, steps = make()
    for _ in range(7):
        optimizer.step()
        steps.step()
    other, again = make()
    other.load_state_dict(optimizer.state_dict())
    again.load_state_dict(steps.state_dict())
    assert other.param_groups[0]["lr"] == 2.0 * curve("cosine")[7]
    other.step()
    again.step()
    assert other.param_groups[0]["lr"] == 2.0 * curve("cosine")[8]


@pytest.mark.parametrize("total", [math.inf, -1])
def test_no_end_is_refused(total):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    with pytest.raises(ValueError, match=r"Set max_steps or max_epochs of the Trainer, or use schedule='constant'\.$"):
        scheduler(optimizer, schedule="wsd", **{**RULE, "total_steps": total})
