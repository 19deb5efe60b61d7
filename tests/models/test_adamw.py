import torch
from torch import nn

from lightning_ups.models.adamw import adamw, decay_groups


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.RMSNorm(4)
        self.b.weight = self.a.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)


def test_groups_are_by_dimension_and_hold_what_trains_once():
    model = Tied()
    decayed, others = decay_groups(model.parameters(), weight_decay=0.5)
    assert [id(p) for p in decayed["params"]] == [id(model.a.weight)]
    assert [id(p) for p in others["params"]] == [id(model.a.bias), id(model.norm.weight)]
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.5, 0.0)


def test_a_model_of_matrices_alone_has_one_group():
    assert len(decay_groups(nn.Linear(2, 2, bias=False).parameters(), weight_decay=0.5)) == 1


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
