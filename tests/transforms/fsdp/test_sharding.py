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


def groups():
    model = two_blocks()
    torch.manual_seed(torch.distributed.get_rank())  # every rank starts from its own values
    for p in model.parameters():
        nn.init.normal_(p)
    torch.manual_seed(0)
    expected = [torch.empty_like(p).normal_() for p in model.parameters()]
    done = sharded_model(model)
    weights = [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]
    return (
        [name for name, m in model.named_modules() if isinstance(m, FSDPModule)],
        [*done.replicated],
        all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True)),
        done.share_of_blocks,
        sharded(model) is done,
        type(model).__name__,
    )


def test_blocks_and_roots_are_groups_and_every_rank_gets_the_first_ranks_values(ranks):
    names, replicated, equal, share, known, kind = ranks(groups)
    assert names == ["", "layers.0", "layers.1", "norm"]
    assert replicated == ["scale"]
    assert equal
    assert share == 40 / 49
    assert known
    assert kind == "Module"


def norms(options):
    model = two_blocks()
    done = sharded_model(model, options)
    return sorted(done.replicated)


def test_a_norm_with_statistics_stays_whole_where_blocks_compute_in_bfloat16(ranks):
    assert ranks(norms, ShardOptions()) == ["scale"]
    assert ranks(norms, ShardOptions(param_dtype=torch.bfloat16)) == ["norm.bias", "norm.weight", "scale"]


def shard_twice(later):
    model = nn.Sequential(nn.Linear(2, 2))
    root = sharded_model(model).root
    initialise(root)
    with torch.no_grad():
        model(torch.ones(1, 2))
    begin_forward(root)  # as if an exception left the forward
    whole = unsharded(model)
    sharded_model(model, later)
    left = unsharded(model)
    begin_forward(root)
    end_forward(root)
    return whole, left


def test_a_later_run_finds_shards_after_an_evaluation_and_after_an_exception(ranks):
    whole, left = ranks(shard_twice, ShardOptions())
    assert whole == ["0.weight", "0.bias"]
    assert left == []


@pytest.mark.parametrize(
    ("options", "cure"),
    [
        (ShardOptions(param_dtype=torch.bfloat16), "Keep the precision of the earlier run"),
        (ShardOptions(reshard_after_forward=False), "Keep the settings of the earlier run"),
    ],
)
def test_another_way_says_what_to_do(ranks, options, cure):
    with pytest.raises(AssertionError, match=rf"(?s)sharded by an earlier run.*{cure}"):
        ranks(shard_twice, options)


def sharded_by_the_user():
    model = two_blocks()
    fully_shard(model.layers[0], mesh=init_device_mesh("cpu", (2,)))
    sharded_model(model)


def test_what_the_user_sharded_is_refused(ranks):
    with pytest.raises(
        AssertionError, match=r"(?s)layers.0 was passed to fully_shard.*Remove the calls of fully_shard"
    ):
        ranks(sharded_by_the_user)


def lazy():
    model = nn.ModuleList([nn.LazyLinear(2)])
    sharded_model(model)


def in_one_memory():
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    model[1].weight.data = model[0].weight.data
    sharded_model(model)


def test_two_parameters_in_one_memory_are_refused(ranks):
    with pytest.raises(AssertionError, match=r"(?s)0.weight and 1.weight are two parameters that share memory"):
        ranks(in_one_memory)


def test_a_parameter_without_a_shape_is_refused(ranks):
    with pytest.raises(AssertionError, match=r"(?s)0.weight has no shape yet.*use a module with explicit sizes"):
        ranks(lazy)


def prefetched():
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))
    sharded_model(model, ShardOptions(prefetch=2))
    states = {m._get_fsdp_state(): i for i, m in enumerate(model.layers)}
    return [
        (
            [states[s] for s in m._get_fsdp_state()._states_to_forward_prefetch],
            [states[s] for s in m._get_fsdp_state()._states_to_backward_prefetch],
        )
        for m in model.layers
    ]


def test_prefetch_follows_the_order_of_blocks(ranks):
    assert ranks(prefetched) == [([1, 2], []), ([2, 3], [0]), ([3], [1, 0]), ([], [2, 1])]


def in_two_places():
    torch.manual_seed(0)
    model = nn.Module()
    model.body = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    model.tail = model.body[0][1]  # seen last at another depth than within the block that holds it
    done = sharded_model(model, blocks={"tail": model.tail, "body.0": model.body[0]})
    return done.blocks, [name for name, m in model.named_modules() if isinstance(m, FSDPModule)], unsharded(model)


def test_a_block_in_two_places_is_sharded_before_the_one_that_holds_it(ranks):
    names, groups, left = ranks(in_two_places)
    assert names == ("tail", "body.0")
    assert groups == ["", "body", "body.0", "body.0.1"]
    assert left == []


def strided_buffers():
    rank = torch.distributed.get_rank()
    model = nn.Module()
    model.layer = nn.Linear(4, 4)
    model.layer.register_buffer("part", (torch.arange(8.0).view(4, 2) + 10 * rank)[:, 0])
    model.layer.register_buffer("turned", (torch.arange(4.0).view(2, 2) + 10 * rank).t())
    sharded_model(model)
    every = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, [buffer.tolist() for buffer in model.buffers()])
    return every


def test_buffers_of_any_strides_start_alike(ranks):
    first, second = ranks(strided_buffers)
    assert first == second == [[0, 2, 4, 6], [[0, 2], [1, 3]]]


def hung():
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
    return model.layers[0][0].weight.no_decay, hasattr(model.layers[1][0].weight, "no_decay"), seen


def test_what_the_user_hung_on_a_parameter_is_on_its_shard_and_sees_whole_gradients(ranks):
    assert ranks(hung) == (True, False, [(4, 4), (4, 4)])


def test_a_hook_after_accumulation_is_refused_since_it_sees_one_devices_part(ranks):
    with pytest.raises(AssertionError, match=r"layers\.0\.0\.weight has a hook that runs when its gradient"):
        ranks(hooked_after)


def hooked_after():
    model = two_blocks()
    model.layers[0][0].weight.register_post_accumulate_grad_hook(lambda p: None)
    sharded_model(model)


def odd_tables():
    model = nn.Module()
    model.tables = nn.ModuleList([nn.Embedding(2, 4, sparse=True), nn.EmbeddingBag(2, 4, max_norm=1.0)])
    model.tables.append(nn.Embedding(2, 4))
    model.none = nn.Parameter(torch.empty(0, 4))
    return [*sharded_model(model).replicated]


def test_what_has_no_elements_or_sparse_gradients_or_is_written_by_a_forward_stays_whole(ranks):
    assert ranks(odd_tables) == ["none", "tables.0.weight", "tables.1.weight"]


def scripted(options):
    torch.manual_seed(dist.get_rank())
    model = two_blocks()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model.layers[1] = torch.jit.script(model.layers[1])
    done = sharded_model(model, options)
    first = model.layers[1][0].weight.detach().clone()
    dist.broadcast(first, src=0)
    return sorted(done.replicated), torch.equal(model.layers[1][0].weight, first)


def test_what_torchscript_holds_stays_whole_and_is_not_cast(ranks):
    names = ["layers.1.0.bias", "layers.1.0.weight", "scale"]
    assert ranks(scripted, ShardOptions()) == (names, True)
    with pytest.raises(AssertionError, match=r"Sequential, a TorchScript module, .* precision='32-true'"):
        ranks(scripted, ShardOptions(param_dtype=torch.bfloat16))


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


def blocks_before_and_after():
    found = {}
    for name, make in MADE.items():
        model = nn.Module()
        model.inner = make()
        before = find_blocks(model)
        classes = [type(block).__name__ for block in before.values()]
        sharded_model(model, blocks=before)
        after = find_blocks(model)
        names = [type(block).__name__ for block in after.values()]
        found[name] = [*before] == [*after] and before.origin == after.origin and classes == names
    return found


def test_a_later_run_finds_the_blocks_that_the_first_found(ranks):
    assert ranks(blocks_before_and_after) == dict.fromkeys(MADE, True)
