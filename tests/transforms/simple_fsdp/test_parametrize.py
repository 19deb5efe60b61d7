import copy
import warnings
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_ups._compat.torch.fsdp.shard_data import shard_data_written
from lightning_ups.transforms.blocks import find_blocks, roots
from lightning_ups.transforms.compile.compiler import compiled
from lightning_ups.transforms.compile.frame import Compiler, prepared
from lightning_ups.transforms.fsdp.sharding import ShardOptions, is_sharded, shard
from lightning_ups.transforms.sharding.mesh import MeshSizes, build_mesh
from lightning_ups.transforms.simple_fsdp.gather_graph import GatherPlan
from lightning_ups.transforms.simple_fsdp.parametrize import (
    ParametriseOptions,
    check_parametrisable,
    is_parametrised,
    parametrise,
    parametrised,
    shards_of,
)
from tests.strategies.cases import two_ranks


def the_mesh():
    return build_mesh("cpu", MeshSizes.of(dist.get_world_size()))  # the one that strategies have


def done(model, mesh=None, **options):
    return parametrise(
        model,
        blocks=find_blocks(model),
        roots=[root for _, root in roots(model)],
        mesh=mesh or the_mesh(),
        options=ParametriseOptions(**options),
    )


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.second(self.first(x)) * self.scale


@two_ranks
def test_a_read_gives_the_shard_or_the_whole():
    model, plain = Net(), Net()
    keys = list(model.state_dict())
    record = done(model)
    outside = model.first.weight
    with record.gathering.reading(whole=True):
        within = model.first.weight
    assert list(model.state_dict()) == keys
    assert outside is dict(model.named_parameters())["first.weight"]
    assert isinstance(outside, DTensor)
    assert outside.to_local().shape == (2, 4)
    assert torch.equal(within.detach(), plain.first.weight)
    assert (within.is_leaf, within.requires_grad) == (False, True)
    assert type(model.first).__name__ == "Linear"
    assert isinstance(model.first, nn.Linear)
    assert list(record.replicated) == ["scale"]
    assert parametrised(model) is record
    assert (is_parametrised(model), is_parametrised(plain), is_sharded(model)) == (True, False, False)


@two_ranks
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_what_cannot_be_shared_alike_stays_whole(dtype):
    model = nn.Module()
    model.first, model.odd, model.table = nn.Linear(4, 1), nn.Linear(3, 3), nn.Embedding(5, 4)
    model.large = nn.Embedding(2**10 + 1, 2**10)
    gathering = done(model, param_dtype=dtype).gathering
    with gathering.reading(whole=True):
        types = {model.first.bias.dtype, model.odd.weight.dtype, model.table.weight.dtype}
        output = model.first(torch.ones(1, 4, dtype=dtype)).dtype
    places = {name: getattr(p.placements[0], "dim", None) for name, p in model.named_parameters()}
    assert types == {dtype or torch.float32}
    assert output == dtype or dtype is None
    assert places == {
        "first.weight": None, "first.bias": None, "odd.weight": None, "odd.bias": None, "table.weight": None,
        "large.weight": 1,
    }  # fmt: skip
    assert parametrised(model).replicated.keys() == {name for name, dim in places.items() if dim is None}


@two_ranks
def test_every_rank_starts_from_the_first_ones_values():
    model = Net()
    torch.manual_seed(dist.get_rank())
    for p in model.parameters():
        nn.init.normal_(p)
    torch.manual_seed(0)
    expected = [torch.empty_like(p).normal_() for p in model.parameters()]
    done(model)
    for p, right in zip(model.parameters(), expected, strict=True):
        assert torch.equal((p.full_tensor() if isinstance(p, DTensor) else p).detach(), right)


@two_ranks
@pytest.mark.parametrize(("dtype", "reduce", "tolerance"), [(None, None, 1e-6), (torch.bfloat16, torch.float32, 5e-2)])
def test_gradients_are_averaged_and_sharded(dtype, reduce, tolerance):
    model, plain = Net(), Net()
    record = done(model, param_dtype=dtype, reduce_dtype=reduce)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    with record.gathering.reading(whole=True):
        model(x).float().square().mean().backward()
    plain(x).square().mean().backward()
    compared = 0
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        if isinstance(p, DTensor):
            dist.all_reduce(q.grad)
            assert p.grad.placements == p.placements
            assert p.grad.dtype is torch.float32
            torch.testing.assert_close(p.grad.full_tensor(), q.grad / 2, rtol=tolerance, atol=tolerance)
            compared += 1
    assert compared == 3


@two_ranks
def test_frozen_stay_frozen_and_tied_stay_tied():
    model = Net()
    model.first.requires_grad_(False)
    model.second.weight = model.first.weight  # tied, and frozen with it
    model.extra = nn.Linear(4, 4)
    model.other = nn.Linear(4, 4)
    model.other.weight = model.extra.weight
    model.extra.weight.mark = "kept"
    record = done(model)
    with record.gathering.reading(whole=True):
        assert not model.first.weight.requires_grad
        (model.extra.weight * 2 + model.other.weight).sum().backward()
    assert (model.first.weight.requires_grad, model.first.bias.requires_grad) == (False, False)
    assert model.extra.weight is model.other.weight
    assert model.first.weight is model.second.weight
    names = [name for name, _ in model.named_parameters()]
    assert names == ["scale", "first.weight", "first.bias", "extra.weight", "extra.bias", "other.bias"]
    assert model.extra.weight.grad.full_tensor().unique().tolist() == [3.0]
    assert model.extra.weight.mark == "kept"


@two_ranks
def test_a_copy_has_weights_of_its_own():
    model = Net()
    record = done(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.first.weight.fill_(7.0)
    x = torch.ones(1, 4)
    with record.gathering.reading(whole=True):
        assert model.first.weight.unique().numel() > 1
        assert twin.first.weight.unique().tolist() == [7.0]
        assert not torch.equal(model(x), twin(x))
    assert twin(x).shape == (1, 4)  # by itself: the hooks came along
    assert not record.gathering.active


@two_ranks
def test_contexts_nest_and_end_after_an_error():
    model = Net()
    gathering = done(model).gathering

    def is_shard():
        return isinstance(model.first.weight, DTensor)

    assert is_shard()
    with gathering.reading(whole=True):
        assert not is_shard()
        with shards_of(model):
            assert is_shard()
            with shards_of(model):
                assert is_shard()
            with gathering.reading(whole=True):
                assert not is_shard()
            assert is_shard()
        assert not is_shard()
    assert is_shard()
    with pytest.raises(KeyError), gathering.reading(whole=True):
        raise KeyError
    assert is_shard()


@two_ranks
def test_two_models_of_one_class_have_settings_of_their_own():
    half, full, copied = Net(), Net(), Net()
    mesh = build_mesh("cpu", MeshSizes(replicate=2, shard=1, tensor=1))
    records = [done(half, param_dtype=torch.bfloat16), done(full), done(copied, mesh)]
    types = []
    for model, record in zip((half, full, copied), records, strict=True):
        placements = [type(p).__name__ for p in model.first.weight.placements]
        with record.gathering.reading(whole=True):
            types.append((model.first.weight.dtype, placements))
    assert types == [
        (torch.bfloat16, ["Shard"]),
        (torch.float32, ["Shard"]),
        (torch.float32, ["Replicate", "Shard"]),
    ]
    with records[0].gathering.reading(whole=True):
        assert isinstance(full.first.weight, DTensor)
    assert type(half.first) is not type(full.first)


@two_ranks
def test_only_what_computes_in_the_type_is_gathered_in_it():
    model = nn.Module()
    model.norm, model.linear = nn.BatchNorm1d(4), nn.Linear(4, 4)
    model.wide, model.phase = nn.Linear(4, 4, dtype=torch.float64), nn.Parameter(torch.zeros(4, dtype=torch.complex64))
    record = done(model, param_dtype=torch.bfloat16)
    with record.gathering.reading(whole=True):
        types = [t.dtype for t in (model.norm.weight, model.linear.weight, model.wide.weight, model.phase)]
    assert types == [torch.float32, torch.bfloat16, torch.float64, torch.complex64]


WRITES = {
    "in place": lambda w: w.mul_(0.5),
    "data": lambda w: w.data.zero_(),
    "detached": lambda w: w.detach().add_(1),
    "init": nn.init.zeros_,
    "view": lambda w: w[0].zero_(),
}


@two_ranks
@pytest.mark.parametrize("name", WRITES)
def test_a_write_is_kept_outside_a_step_and_refused_within(name):
    model = Net()
    gathering = done(model).gathering
    with gathering.reading(whole=True), torch.no_grad():
        WRITES[name](model.second.weight)
    with pytest.raises(RuntimeError, match=r"^second\.weight was written to within a step"):
        gathering.check_unwritten(model)
    gathering.check_unwritten(model)  # said once
    with gathering.reading(whole=True):
        model.second.weight.data.sum()  # reading is fine
    gathering.check_unwritten(model)
    with torch.no_grad():
        before = model.second.weight.full_tensor().clone()
        model.second.weight.mul_(2)
        with gathering.reading(whole=True), shards_of(model):
            model.second.weight.mul_(2)
    assert torch.equal(model.second.weight.full_tensor(), before * 4)


@two_ranks
def test_a_whole_tensor_in_the_place_of_a_shard_is_refused():
    model = Net()
    gathering = done(model).gathering
    with pytest.raises(ValueError, match=r"^weight of a Linear is sharded.*module\.weight\[:\] = values"):
        model.first.weight = nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(RuntimeError, match=r"^A parameter was written to"), gathering.reading(whole=True):
        model.first.weight.data = torch.zeros(4, 4)
    model.first.weight = model.first.weight  # a shard may be set
    with torch.no_grad(), shard_data_written():
        model.second.weight[:] = torch.full((4, 4), 3.0)  # as the message says
        model.scale.fill_(3.0)
    assert model.second.weight.full_tensor().unique().tolist() == [3.0]
    with gathering.reading(whole=True):
        model(torch.ones(1, 4)).sum().backward()
        assert isinstance(model.first.weight.grad, DTensor)
        model.first.weight.grad = None
    assert model.first.weight.grad is None
    del model.second.weight
    assert not hasattr(model.second, "weight")


@two_ranks
def test_a_root_that_is_called_outside_a_step_gathers():
    model = nn.Module()
    model.root = Net()
    gathering = done(model).gathering
    assert torch.equal(model.root(torch.ones(1, 4)).detach(), Net()(torch.ones(1, 4)).detach())
    model.root.first.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.root(torch.ones(1, 4))
    assert not gathering.active
    assert gathering._before == []


class Writes(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.inner, self.how = nn.Linear(4, 4), how

    def forward(self, x):
        with torch.no_grad():
            if self.how == "in place":
                self.inner.weight.clamp_(-1, 1)
            elif self.how == "data":
                self.inner.weight.data.clamp_(-1, 1)
            elif self.how == "view":
                self.inner.weight.view(-1).clamp_(-1, 1)
        return self.inner(x)


@two_ranks
@pytest.mark.parametrize("how", ["in place", "data", "view", "not"])
def test_a_write_in_a_compiled_forward_is_refused(how):
    model = nn.Module()
    model.root = Writes(how)
    gathering = done(model).gathering
    compiler = Compiler(backend="aot_eager", fullgraph=True)
    refused = pytest.raises(RuntimeError, match="writes to a parameter within its forward")
    with (
        prepared(GatherPlan.of([], ["root"], recompute=True, key=how)),
        compiled({"root": model.root}, compiler),
        gathering.reading(whole=True),
        nullcontext() if how == "not" else refused,
    ):
        model.root(torch.ones(1, 4))


@two_ranks
def test_a_write_in_a_call_outside_a_step_is_refused():
    model = nn.Module()
    model.root = Writes("in place")
    done(model)
    with pytest.raises(RuntimeError, match=r"^inner\.weight was written to within a step"):
        model.root(torch.ones(1, 4))


IMPOSSIBLE = {
    "table has max_norm=1.0: it scales rows": lambda: nn.ModuleDict({"table": nn.Embedding(4, 2, max_norm=1.0)}),
    "table has sparse=True": lambda: nn.ModuleDict({"table": nn.Embedding(4, 2, sparse=True)}),
    "has no shape yet": lambda: nn.Sequential(nn.LazyLinear(2)),
    "is a module of TorchScript": lambda: nn.ModuleDict({"traced": torch.jit.script(nn.Linear(2, 2))}),
    "first.weight has a gradient hook": lambda: hooked("register_hook"),
    "first.weight has a hook that runs when": lambda: hooked("register_post_accumulate_grad_hook"),
}


def hooked(register):
    model = Net()
    getattr(model.first.weight, register)(torch.sign)
    return model


@pytest.mark.parametrize("text", IMPOSSIBLE)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_sharded_is_refused(text):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = IMPOSSIBLE[text]()
    with pytest.raises(ValueError, match=text):
        check_parametrisable(model)


@two_ranks
def test_a_second_sharding_is_the_same_or_refused():
    model = Net()
    first = done(model)
    assert done(model) is first
    assert len(model._forward_pre_hooks) == 1
    with pytest.raises(ValueError, match=r"param_dtype=None, and this run asks for param_dtype=torch\.bfloat16"):
        done(model, param_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="sharded by an earlier run with another strategy"):
        shard(model, blocks={}, roots=[], mesh=the_mesh(), options=ShardOptions())
    with pytest.raises(ValueError, match="was sharded before the strategy could"):
        done(copy.deepcopy(model))


@two_ranks
def test_what_is_frozen_within_a_step_is_the_shard():
    model = Net()
    gathering = done(model).gathering
    with gathering.reading(whole=True):
        assert model.first.weight.requires_grad
        with torch.no_grad():
            model.first.weight.requires_grad = False
        assert not model.first.weight.requires_grad
        model.first.bias.requires_grad_(False).requires_grad_()
        model.second.weight.requires_grad_(False)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["scale", "first.bias"]


@two_ranks
def test_a_write_in_a_step_that_failed_is_not_held_against_the_next_run():
    model = Net()
    gathering = done(model).gathering
    with gathering.reading(whole=True), torch.no_grad():
        model.first.weight.zero_()  # and then an exception
    assert done(model).gathering is gathering
    gathering.check_unwritten(model)


@two_ranks
def test_what_a_call_outside_a_step_gathered_is_not_kept():
    model, seen = nn.Module(), []
    model.root = Net()
    gathering = done(model).gathering
    model.root.first.register_forward_hook(lambda layer, *_: seen.append(weakref.ref(layer.weight)))
    with torch.no_grad():
        for _ in range(2):
            model.root(torch.ones(1, 4))
        assert [ref() for ref in seen] == [None, None]
        with gathering.reading(whole=True):
            model.root(torch.ones(1, 4))
            assert seen[-1]() is not None
        gathering.check_unwritten(model)
    assert seen[-1]() is None


@two_ranks
def test_what_ranks_must_do_alike_is_noted_in_its_order():
    """Of a module with scalars only nothing is gathered, so that a rank may call it alone."""
    model = nn.Module()
    model.root, model.other, model.scale = Net(), Net(), nn.Module()
    model.scale.weight = nn.Parameter(torch.tensor(1.0))
    gathering = done(model).gathering
    assert list(gathering.names.values()) == ["root", "other"]

    def noted(act, *, training=True):
        gathering.noted = 0
        with gathering.reading(whole=True), gathering.noting(training=training):
            act()
        return gathering.noted

    x = torch.ones(1, 4)
    model.root(x)
    assert gathering.noted == 0
    assert noted(lambda: model.scale.weight) == noted(lambda: model.root(x), training=False) == 0
    one, other = noted(lambda: model.other(model.root(x))), noted(lambda: model.root(model.other(x)))
    assert one != other
    assert one == noted(lambda: model.other(model.root(x)))
    assert noted(lambda: model.root.first.weight) != 0


@two_ranks
def test_of_copies_a_rank_may_run_one_alone():
    model = nn.Module()
    model.root = Net()
    gathering = done(model, build_mesh("cpu", MeshSizes(replicate=2, shard=1, tensor=1))).gathering
    with gathering.reading(whole=True), gathering.noting(training=True):
        model.root(torch.ones(1, 4))
    assert gathering.noted == 0
