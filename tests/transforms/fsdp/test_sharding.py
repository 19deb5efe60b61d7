import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from lightning_ups._compat.torch.fsdp.state import begin_forward, end_forward, initialise
from lightning_ups.transforms.blocks import find_blocks, roots
from lightning_ups.transforms.fsdp.sharding import ShardOptions, is_sharded, shard, sharded
from lightning_ups.transforms.sharding.mesh import MeshSizes, build_mesh, unsharded
from tests.strategies.cases import two_ranks


def sharded_model(model, options=None, blocks=None):
    mesh = build_mesh("cpu", MeshSizes.of(torch.distributed.get_world_size()))
    blocks = find_blocks(model) if blocks is None else blocks
    return shard(model, blocks=blocks, roots=[r for _, r in roots(model)], mesh=mesh, options=options or ShardOptions())


def test_what_nothing_would_reduce_is_named():
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    assert unsharded(model) == ["weight"]
    assert not is_sharded(model)


def two_blocks():
    torch.manual_seed(0)
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
    model.norm, model.scale = nn.BatchNorm1d(4), nn.Parameter(torch.tensor(1.0))
    return model


@two_ranks
def test_blocks_and_roots_are_groups_and_every_rank_gets_the_first_ranks_values():
    model = two_blocks()
    torch.manual_seed(dist.get_rank())  # every rank starts from its own values
    for p in model.parameters():
        nn.init.normal_(p)
    torch.manual_seed(0)
    expected = [torch.empty_like(p).normal_() for p in model.parameters()]
    done = sharded_model(model)
    for p, right in zip(model.parameters(), expected, strict=True):
        assert torch.equal((p.full_tensor() if isinstance(p, DTensor) else p).detach(), right)
    assert groups_of(model) == ["", "layers.0", "layers.1", "norm"]
    assert [*done.replicated] == ["scale"]
    assert done.share_of_blocks == 40 / 49
    assert sharded(model) is done
    assert type(model).__name__ == "Module"


def groups_of(model):
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]


@two_ranks
def test_a_norm_with_statistics_stays_whole_where_blocks_compute_in_bfloat16():
    assert sorted(sharded_model(two_blocks()).replicated) == ["scale"]
    done = sharded_model(two_blocks(), ShardOptions(param_dtype=torch.bfloat16))
    assert sorted(done.replicated) == ["norm.bias", "norm.weight", "scale"]


@two_ranks
def test_a_later_run_finds_shards_after_an_evaluation_and_after_an_exception():
    model = nn.Sequential(nn.Linear(2, 2))
    root = sharded_model(model).root
    initialise(root)
    with torch.no_grad():
        model(torch.ones(1, 2))
    begin_forward(root)  # as if an exception left the forward
    assert unsharded(model) == ["0.weight", "0.bias"]
    sharded_model(model, ShardOptions())
    assert unsharded(model) == []
    begin_forward(root)
    end_forward(root)
    with pytest.raises(ValueError, match=r"sharded by an earlier run.*Keep the precision of the earlier run"):
        sharded_model(model, ShardOptions(param_dtype=torch.bfloat16))


@two_ranks
def test_what_the_user_sharded_is_refused():
    model = two_blocks()
    fully_shard(model.layers[0], mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(ValueError, match=r"layers.0 was passed to fully_shard.*Remove the calls of fully_shard"):
        sharded_model(model)


@two_ranks
def test_prefetch_follows_the_order_of_blocks():
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))
    sharded_model(model, ShardOptions(prefetch=2))
    states = {module._get_fsdp_state(): i for i, module in enumerate(model.layers)}
    assert [[states[s] for s in state._states_to_forward_prefetch] for state in states] == [[1, 2], [2, 3], [3], []]
    assert [[states[s] for s in state._states_to_backward_prefetch] for state in states] == [[], [0], [1, 0], [2, 1]]


@two_ranks
def test_a_block_in_two_places_is_sharded_before_the_one_that_holds_it():
    torch.manual_seed(0)
    model = nn.Module()
    model.body = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    model.tail = model.body[0][1]  # seen last at another depth than within the block that holds it
    done = sharded_model(model, blocks={"tail": model.tail, "body.0": model.body[0]})
    assert done.blocks == ("tail", "body.0")
    assert groups_of(model) == ["", "body", "body.0", "body.0.1"]
    assert unsharded(model) == []


@two_ranks
def test_buffers_of_any_strides_start_alike():
    rank = dist.get_rank()
    model = nn.Module()
    model.layer = nn.Linear(4, 4)
    model.layer.register_buffer("part", (torch.arange(8.0).view(4, 2) + 10 * rank)[:, 0])
    model.layer.register_buffer("turned", (torch.arange(4.0).view(2, 2) + 10 * rank).t())
    sharded_model(model)
    assert [buffer.tolist() for buffer in model.buffers()] == [[0, 2, 4, 6], [[0, 2], [1, 3]]]


@two_ranks
def test_attributes_and_hooks_of_a_parameter_are_on_its_shard_and_see_whole_gradients():
    model = two_blocks()
    model.layers[0][0].weight.no_decay = True
    seen = []
    model.layers[0][0].weight.register_hook(lambda gradient: seen.append(tuple(gradient.shape)))
    root = sharded_model(model).root
    initialise(root)
    for _ in range(2):
        begin_forward(root)
        model.layers[0](torch.ones(1, 4)).sum().backward()
        end_forward(root)
    assert model.layers[0][0].weight.no_decay
    assert not hasattr(model.layers[1][0].weight, "no_decay")
    assert seen == [(4, 4), (4, 4)]


@two_ranks
def test_what_has_no_elements_or_sparse_gradients_or_is_written_by_a_forward_stays_whole():
    model = nn.Module()
    model.tables = nn.ModuleList([nn.Embedding(2, 4, sparse=True), nn.EmbeddingBag(2, 4, max_norm=1.0)])
    model.tables.append(nn.Embedding(2, 4))
    model.none = nn.Parameter(torch.empty(0, 4))
    assert [*sharded_model(model).replicated] == ["none", "tables.0.weight", "tables.1.weight"]


@two_ranks
def test_what_torchscript_holds_stays_whole_and_is_not_cast():
    torch.manual_seed(dist.get_rank())
    model = two_blocks()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model.layers[1] = torch.jit.script(model.layers[1])
    twin = copy.deepcopy(model)
    assert sorted(sharded_model(model).replicated) == ["layers.1.0.bias", "layers.1.0.weight", "scale"]
    first = model.layers[1][0].weight.detach().clone()
    dist.broadcast(first, src=0)
    assert torch.equal(model.layers[1][0].weight, first)
    with pytest.raises(ValueError, match=r"Sequential, a TorchScript module, .* precision='32-true'"):
        sharded_model(twin, ShardOptions(param_dtype=torch.bfloat16))


class Matrices(nn.Module):
    """Has matrices itself, and no children."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x):
        return x @ self.weight


class Named(nn.Module):
    """Names what repeats, as models of transformers do, where it is in no list."""

    _no_split_modules = ("Matrices",)

    def __init__(self):
        super().__init__()
        self.first, self.second = Matrices(), Matrices()

    def forward(self, x):
        return self.second(self.first(x))


MADE = {
    "matrices": lambda: nn.ModuleList([Matrices(), Matrices()]),
    "named": Named,
    "stem and stage": lambda: nn.ModuleList(
        [nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4)]
    ),
}


@two_ranks
@pytest.mark.parametrize("name", MADE)
def test_a_later_run_finds_the_blocks_that_the_first_found(name):
    model = nn.Module()
    model.inner = MADE[name]()
    before = find_blocks(model)
    classes = [type(block).__name__ for block in before.values()]
    sharded_model(model, blocks=before)
    after = find_blocks(model)
    assert [*before] == [*after]
    assert before.origin == after.origin
    assert [type(block).__name__ for block in after.values()] == classes
