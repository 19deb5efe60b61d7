import torch
from torch import nn
from torch.nn.functional import linear

from lightning_ups._compat.torch.fsdp.state import begin_forward, end_forward, expect_backward, initialise, unreduced
from lightning_ups.transforms.fsdp.external_reads import WatchedReads
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


def stepped(*, grad=True):
    torch.manual_seed(dist_rank())
    x, model, whole = torch.randn(3, 4), Model(), Model()
    root = sharded_model(model).root
    initialise(root)
    found = []
    for watch in (True, False):
        model.zero_grad()
        begin_forward(root)
        with torch.set_grad_enabled(grad):
            if watch:
                reads = WatchedReads(root)
                with reads.watching():
                    loss = model.step(x)
                found = reads.found
            else:
                loss = model.step(x)
        end_forward(root)
        if grad:
            expect_backward(root, loss)
            loss.backward()
    right = whole.step(x)
    if not grad:
        return found, torch.allclose(loss, right), []
    right.backward()
    gradients = []
    for p, e in zip(model.parameters(), whole.parameters(), strict=True):
        torch.distributed.all_reduce(e.grad)
        gradients.append(torch.allclose(p.grad.full_tensor(), e.grad / 2, atol=1e-5))
    assert unreduced(root) == []
    return found, torch.allclose(loss, right), gradients


def dist_rank():
    return torch.distributed.get_rank()


def evaluated():
    return stepped(grad=False)


def test_a_weight_read_outside_is_found_and_right_from_the_first_step_on(ranks):
    found, loss, gradients = ranks(stepped)
    assert found == ["layers.0.0.weight"]
    assert loss
    assert all(gradients)


def test_an_evaluation_finds_it_too(ranks):
    found, loss, _ = ranks(evaluated)
    assert found == ["layers.0.0.weight"]
    assert loss


def hidden_in_blocks():
    model = Model()
    modes = []
    root = sharded_model(model).root
    initialise(root)
    forward = model.layers[0][1].forward
    model.layers[0][1].forward = lambda x: modes.append(torch.overrides._get_current_function_mode()) or forward(x)
    begin_forward(root)
    reads = WatchedReads(root)
    with reads.watching():
        model.layers[0](torch.randn(2, 4))
        modes.append(torch.overrides._get_current_function_mode() is reads)
    end_forward(root)
    return modes


def test_code_inside_blocks_does_not_see_the_watch(ranks):
    assert ranks(hidden_in_blocks) == [None, True]


def in_hand():
    """A weight that is fetched before it is found; a norm without gradients; and a pause in a pause."""
    model = Model()
    root = sharded_model(model).root
    initialise(root)
    begin_forward(root)
    reads = WatchedReads(root)
    weight = model.layers[0][0].weight
    with reads.watching():
        with torch.no_grad():
            norm, copy = weight.norm(), weight.clone()
        doubled = weight + weight.T
        with reads.paused(), reads.paused():
            pass
        watched = torch.overrides._get_current_function_mode() is reads
    end_forward(root)
    whole = Model().layers[0][0].weight
    same = torch.allclose(norm, whole.norm()) and torch.allclose(doubled, whole + whole.T)
    return same, type(norm) is torch.Tensor, type(copy).__name__, reads.translates, watched, reads.found


def test_what_was_in_hand_is_gathered_too_and_what_is_computed_from_shards_is_whole(ranks):
    same, plain, copy, translates, watched, found = ranks(in_hand)
    assert same
    assert plain
    assert copy == "DTensor"
    assert translates
    assert watched
    assert found == ["layers.0.0.weight"]
