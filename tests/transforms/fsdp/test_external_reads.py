from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import linear

from lightning_ups._compat.torch.fsdp.state import begin_forward, end_forward, expect_backward, initialise, unreduced
from lightning_ups.transforms.fsdp.external_reads import WatchedReads
from tests.strategies.cases import two_ranks
from tests.transforms.fsdp.test_sharding import sharded_model


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(4, 4, bias=False)

    def step(self, x):
        next(self.parameters()).device  # noqa: B018  (asking is not reading)
        for layer in self.layers:
            x = layer(x)
        return self.head(linear(self.head(x), self.layers[0][0].weight.T)).square().sum()


@two_ranks
@pytest.mark.parametrize("grad", [True, False])
def test_a_weight_read_outside_is_found_and_right_from_the_first_step_on(grad):
    torch.manual_seed(dist.get_rank())
    x, model, whole = torch.randn(3, 4), Model(), Model()
    root = sharded_model(model).root
    initialise(root)
    reads = WatchedReads(root)
    for watching in (reads.watching(), nullcontext()):
        model.zero_grad()
        begin_forward(root)
        with torch.set_grad_enabled(grad), watching:
            loss = model.step(x)
        end_forward(root)
        if grad:
            expect_backward(root, loss)
            loss.backward()
    assert reads.found == ["layers.0.0.weight"]
    right = whole.step(x)
    assert torch.allclose(loss, right)
    if grad:
        right.backward()
        for p, e in zip(model.parameters(), whole.parameters(), strict=True):
            dist.all_reduce(e.grad)
            torch.testing.assert_close(p.grad.full_tensor(), e.grad / 2, atol=1e-5, rtol=1e-5)
        assert unreduced(root) == []


@two_ranks
def test_code_inside_blocks_does_not_see_the_watch():
    model, modes = Model(), []
    root = sharded_model(model).root
    initialise(root)
    forward = model.layers[0][1].forward
    model.layers[0][1].forward = lambda x: modes.append(torch.overrides._get_current_function_mode()) or forward(x)
    begin_forward(root)
    reads = WatchedReads(root)
    with reads.watching():
        model.layers[0](torch.randn(2, 4))
        assert torch.overrides._get_current_function_mode() is reads
    end_forward(root)
    assert modes == [None]


@two_ranks
def test_what_was_in_hand_is_gathered_too_and_what_is_computed_from_shards_is_whole():
    model = Model()
    root = sharded_model(model).root
    initialise(root)
    begin_forward(root)
    reads, weight = WatchedReads(root), model.layers[0][0].weight  # before it is found
    with reads.watching():
        with torch.no_grad():
            norm, copy = weight.norm(), weight.clone()
        doubled = weight + weight.T
        with reads.paused(), reads.paused():
            pass
        assert torch.overrides._get_current_function_mode() is reads
    end_forward(root)
    whole = Model().layers[0][0].weight
    assert torch.allclose(norm, whole.norm())
    assert torch.allclose(doubled, whole + whole.T)
    assert type(norm) is torch.Tensor
    assert type(copy).__name__ == "DTensor"
    assert reads.translates
    assert reads.found == ["layers.0.0.weight"]
