from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_ups.transforms.apart import find_apart, owner_of
from lightning_ups.transforms.blocks import find_blocks, roots
from lightning_ups.transforms.forward import replaced_forward
from lightning_ups.transforms.shard import ShardOptions, shard

SMALL = "lightning_ups.transforms.apart.LEAST"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.up(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, 8)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.second = nn.Embedding(8, 8)
        self.attention = nn.MultiheadAttention(8, 1)
        self.middle = nn.Linear(8, 7, bias=False)
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(8, 8)

    def forward(self, x):
        return x


class Whole(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.net = inner


def found(model, blocks=None):
    blocks = find_blocks(model) if blocks is None else blocks
    with patch(SMALL, 64):
        return [*find_apart(model, blocks=blocks.values(), roots=[root for _, root in roots(model)])]


def test_large_matrices_behind_blocks_are_found_and_what_comes_before_them_is_not():
    assert found(Whole(Net())) == ["net.second", "net.head"]


def test_nothing_is_found_where_nothing_is_large():
    model = Whole(Net())
    assert find_apart(model, blocks=find_blocks(model).values(), roots=[model.net]) == {}


def test_what_shares_its_weight_is_not_found():
    net = Net()
    net.head.weight = net.embedding.weight
    assert found(Whole(net)) == ["net.second"]


def test_a_root_without_blocks_stays_one_group():
    assert found(Whole(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)))) == []
    assert found(nn.ModuleDict({"body": Net(), "tail": nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))})) == [
        "body.second",
        "body.head",
    ]


def test_what_is_computed_before_it_is_used_is_not_found():
    net = Net()
    nn.utils.parametrizations.weight_norm(net.head)
    assert found(Whole(net)) == ["net.second"]


def test_what_runs_as_one_is_not_cut_in_pieces_and_what_runs_so_by_itself_is_found():
    net = Net()
    net.tail = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))
    assert found(Whole(net)) == ["net.second", "net.head", "net.tail.1"]
    with replaced_forward(net.tail, lambda inner: inner), replaced_forward(net.head, lambda inner: inner):
        assert found(Whole(net)) == ["net.second", "net.head"]
    with replaced_forward(net, lambda inner: inner):
        assert found(Whole(net)) == ["net.second", "net.head", "net.tail.1"]


def test_the_owner_is_the_innermost_sharded_module_around():
    class Sharded(FSDPModule, nn.Sequential):
        pass

    inner = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    model = Whole(inner)
    assert owner_of(model, "net.0.0") is model
    inner.__class__ = Sharded
    assert owner_of(model, "net.0.0") is inner


def size(model):
    return sum(p.numel() * p.element_size() for p in model.parameters())


def groups(options, prepare):
    from lightning_ups.transforms.mesh import MeshSizes, build_mesh

    model = Whole(Net())
    prepare(model.net)
    total = size(model)
    mesh = build_mesh("cpu", MeshSizes.of(torch.distributed.get_world_size()))
    with patch(SMALL, 64):
        outer = [root for _, root in roots(model)]
        done = shard(model, blocks=find_blocks(model), roots=outer, mesh=mesh, options=options)
    names = [name for name, m in model.named_modules() if isinstance(m, FSDPModule)]
    empty = [name for name in names if not model.get_submodule(name)._get_fsdp_state()._fsdp_param_group]
    kept = [name for name in names if model.get_submodule(name) in done.roots]
    blocks = sum(size(model.get_submodule(name)) for name in names if name not in kept)
    return names, kept, [*done.apart], done.share_of_blocks, blocks / total, empty


def as_it_is(net):
    pass


def tie(net):
    net.head.weight = net.embedding.weight


def only_blocks_and_a_head(net):
    del net.embedding, net.second, net.attention, net.middle, net.norm


def scale_rows(net):
    net.second.max_norm = 1.0


def freeze(net):
    net.head.requires_grad_(False)


def other_type(net):
    net.head.bfloat16()


BLOCKS = ["net.layers.0", "net.layers.1"]
GROUPS = {
    "as it is": (ShardOptions(), as_it_is, ["", "net", *BLOCKS, "net.second", "net.head"], ["net.second", "net.head"]),
    "tied": (ShardOptions(), tie, ["", "net", *BLOCKS, "net.second"], ["net.second"]),
    "no rest": (ShardOptions(), only_blocks_and_a_head, ["", "net", *BLOCKS, "net.head"], ["net.head"]),
    "written": (ShardOptions(), scale_rows, ["", "net", *BLOCKS, "net.head"], ["net.head"]),
    "frozen": (ShardOptions(), freeze, ["", "net", *BLOCKS, "net.second", "net.head"], ["net.second", "net.head"]),
    "another type": (ShardOptions(), other_type, ["", "net", *BLOCKS, "net.second"], ["net.second"]),
    "outside": (
        ShardOptions(outside=("net.head.weight",)), as_it_is, ["", "net", *BLOCKS, "net.second"], ["net.second"]
    ),
    "float32": (
        ShardOptions(in_float32=("net.head",), param_dtype=torch.bfloat16), as_it_is,
        ["", "net", *BLOCKS, "net.second", "net.head"], ["net.second"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("options", "prepare", "expected", "apart"), GROUPS.values(), ids=GROUPS)
def test_groups_of_their_own(ranks, options, prepare, expected, apart):
    names, kept, found_apart, share, in_blocks, empty = ranks(groups, options, prepare)
    assert names == expected
    assert found_apart == apart
    assert [name for name in kept if name not in ("", "net")] == apart  # whole from forward to backward
    assert share == in_blocks
    assert all(module in ("", "net") for module in empty)  # a model and its root have none if others have everything
