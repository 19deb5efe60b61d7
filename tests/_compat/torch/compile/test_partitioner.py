"""How backends split a graph: whether a memory budget counts, and what goes wrong where parameters are sharded."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lightning_ups._compat.torch.compile.partitioner import (
    gradients_apart,
    heeds_memory_budget,
    random_numbers_kept,
    random_states_in_place,
)
from lightning_ups._compat.torch.tensors.autograd import activation_memory_budget
from tests.compiled_afresh import compiled_afresh


def dropped(x, weight):
    return F.dropout(x @ weight.redistribute(placements=[Replicate()]).to_local(), 0.5)


def drawn():
    """Return the mask of a dropout that backward recomputes, as forward and as the gradient have it."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = nn.Parameter(distribute_tensor(torch.eye(8), mesh, [Shard(0)]))
    x = torch.eye(8)

    def run(x, weight):
        # Twice, so that there are two states, and a number that differs from call to call.
        y = checkpoint(dropped, x, weight, use_reentrant=False)
        z = checkpoint(dropped, x * x.shape[0], weight, use_reentrant=False)
        return y * y, z * z

    torch.manual_seed(0)
    with random_states_in_place():
        y, z = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=True)(x, weight)
        (y.sum() + z.sum()).backward()
    torch.compiler.reset()
    return weight.grad.full_tensor(), y.detach().sqrt(), z.detach().sqrt()


def test_recomputed_random_numbers_are_those_of_the_forward(ranks):
    gradient, y, z = ranks(drawn)
    kept = [part.diagonal().count_nonzero().item() for part in (y, z)]
    assert all(0 < count < 8 for count in kept)
    # A result is 2 w or 0, and 16 w or 0: its square has the derivative 4 and 32 times what was kept, and no more.
    torch.testing.assert_close(gradient, 4 * y + 32 * z)


def equal_gradients(placements):
    """Return the gradients of two parameters that are summed, after one was doubled in place."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    one, other = (nn.Parameter(distribute_tensor(torch.ones(8), mesh, placements)) for _ in range(2))

    def run(x, *parameters):
        whole = [p.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()]) for p in parameters]
        return sum(whole, x).square()

    with gradients_apart():
        torch.compile(run, backend="aot_eager", fullgraph=True)(torch.ones(8), one, other).sum().backward()
    torch.compiler.reset()
    one.grad.mul_(2)
    return one.grad.full_tensor().tolist(), other.grad.full_tensor().tolist()


@pytest.mark.parametrize("placements", [[Shard(0)], [Replicate()]], ids=repr)
def test_parameters_with_equal_gradients_share_no_memory(ranks, placements):
    assert ranks(equal_gradients, placements) == ([24.0] * 8, [12.0] * 8)


def attended(x, *, rate):
    return F.scaled_dot_product_attention(x, x, x, dropout_p=rate).sin()


def dropped_often(x):
    for _ in range(3):
        x = x + F.dropout(F.gelu(F.dropout(x @ x, 0.5) @ x), 0.5)
    return x


@torch.compiler.nested_compile_region
def region(x):
    return F.dropout((x @ x).sin(), 0.5)


def dropped_in_regions(x):
    return region(region(x).sin()).sin()


def step(run, backend, budget, *, context=random_numbers_kept):
    """Return what a step under a budget gives, with a random number drawn after it, and the bytes that it keeps."""
    torch.compiler.reset()
    torch.manual_seed(0)
    x = torch.randn(1, 2, 8, 8).requires_grad_()
    saved = {}
    with context(), activation_memory_budget(budget):
        compiled = torch.compile(run, backend=backend, fullgraph=True)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: saved.setdefault(t.data_ptr(), t.nbytes) and t, lambda t: t
        ):
            loss = compiled(x)
        loss.sum().backward()
    return (loss.detach(), x.grad, torch.rand(1)), sum(saved.values())


@pytest.mark.parametrize("run", [dropped_often, partial(attended, rate=0.5)], ids=["dropout", "attention"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_what_a_budget_recomputes_has_the_random_numbers_of_the_forward(run, backend):
    with compiled_afresh():
        expected, most = step(run, backend, 1.0)
        for budget in (0.9, 0.5, 0.1, 0.0):
            actual, kept = step(run, backend, budget)
            for a, e in zip(actual, expected, strict=True):
                torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-6)
            assert kept <= most


def test_a_region_that_draws_is_refused_under_a_budget_and_says_what_to_do():
    with pytest.raises(Exception, match=r"invoke_subgraph draws random numbers.*use ActivationCheckpoint\(save="):
        step(dropped_in_regions, "aot_eager", 0.5)
    step(dropped_in_regions, "aot_eager", 1.0)


def test_without_it_they_are_others():
    expected, _ = step(dropped_often, "aot_eager", 1.0)
    actual, _ = step(dropped_often, "aot_eager", 0.0, context=nullcontext)
    assert not torch.allclose(actual[1], expected[1])


def test_what_is_kept_falls_with_the_budget_where_random_numbers_are_drawn():
    kept = [step(dropped_often, "aot_eager", budget)[1] for budget in (1.0, 0.4, 0.0)]
    assert kept[0] > kept[1] > kept[2]


def test_attention_without_dropout_is_recomputed():
    with_dropout, without = (step(partial(attended, rate=rate), "aot_eager", 0.0)[1] for rate in (0.5, 0.0))
    assert without < with_dropout
    assert without == 2 * 8 * 8 * 4  # the argument


def recomputed_flops(backend):
    """Return how many more FLOPs a backward takes under a budget of nothing."""

    def flops(budget):
        torch.compiler.reset()
        weight = nn.Parameter(torch.ones(8, 8))
        with activation_memory_budget(budget):
            loss = torch.compile(lambda x: (x @ x).sin() @ x, backend=backend)(weight).sum()
        with FlopCounterMode(display=False) as counter:
            loss.backward()
        return counter.get_total_flops()

    return flops(0.0) - flops(1.0)


@pytest.mark.parametrize("backend", ["aot_eager", "aot_eager_decomp_partition"])
def test_a_budget_counts_where_a_graph_is_split_by_cost(backend):
    assert recomputed_flops(backend) > 0
    assert heeds_memory_budget(backend)


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")  # of torch, where modules have global hooks
@pytest.mark.parametrize("backend", ["eager", "eager_debug", "aot_eager_default_partitioner", "cudagraphs"])
def test_a_budget_does_not_count_where_a_graph_is_split_otherwise_or_not_at_all(backend):
    assert recomputed_flops(backend) == 0
    assert not heeds_memory_budget(backend)
