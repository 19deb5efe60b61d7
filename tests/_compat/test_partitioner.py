"""How backends split a graph: whether a memory budget counts, and what goes wrong where parameters are sharded."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch._functorch import partitioners  # noqa: TID251
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lightning_ups._compat.autograd import activation_memory_budget
from lightning_ups._compat.partitioner import gradients_apart, heeds_memory_budget, random_states_in_place
from tests.backends import register


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


@pytest.mark.parametrize("change", [random_states_in_place, gradients_apart])
def test_the_partitioner_is_put_back(change):
    before = {**vars(partitioners)}
    with change():
        pass
    assert vars(partitioners) == before


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
@pytest.mark.parametrize(
    "backend", ["eager", "eager_debug", "aot_eager_default_partitioner", "cudagraphs", "ups_aot_as_it_is"]
)
def test_a_budget_does_not_count_where_a_graph_is_split_otherwise_or_not_at_all(backend):
    register()
    assert recomputed_flops(backend) == 0
    assert heeds_memory_budget(backend) is False


@pytest.mark.parametrize("mode", [lambda: torch.autocast("cpu", torch.bfloat16), torch.inference_mode, torch.no_grad])
def test_whether_a_budget_counts_depends_on_no_mode_that_is_in_force(mode):
    with mode():
        assert heeds_memory_budget.__wrapped__("aot_eager")


def test_to_see_whether_a_budget_counts_says_nothing(caplog, recwarn):
    assert heeds_memory_budget.__wrapped__("cudagraphs") is False
    assert not caplog.records
    assert not recwarn.list


@pytest.mark.parametrize("backend", ["ups_forward_refused", "ups_forward_dies", "no_such_backend"])
def test_of_a_backend_that_does_not_run_it_is_not_known_whether_a_budget_counts(backend):
    register()
    assert heeds_memory_budget(backend) is None
