"""Random numbers in what a graph with sharded parameters recomputes: drawn anew as they were."""

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch._functorch import partitioners  # noqa: TID251
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from lightning_ups._compat.partitioner import random_states_in_place


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


def test_the_partitioner_is_put_back():
    before = partitioners.functionalize_rng_ops
    with random_states_in_place():
        pass
    assert partitioners.functionalize_rng_ops is before
