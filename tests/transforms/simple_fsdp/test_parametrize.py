import copy
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_ups._compat.torch.fsdp.shard_data import shard_data_written
from lightning_ups.transforms.blocks import find_blocks, roots
from lightning_ups.transforms.compile.frame import prepared
from lightning_ups.transforms.fsdp.sharding import ShardOptions, is_sharded, shard
from lightning_ups.transforms.sharding.mesh import MeshSizes, build_mesh
from lightning_ups.transforms.simple_fsdp.gather_graph import GatherPlan
from lightning_ups.transforms.simple_fsdp.parametrize import (
    ParametriseOptions,
    is_parametrised,
    parametrise,
    parametrised,
    shards_of,
)


def two_ranks():
    return build_mesh("cpu", MeshSizes.of(dist.get_world_size()))  # the one that strategies have


def done(model, mesh=None, **options):
    return parametrise(
        model,
        blocks=find_blocks(model),
        roots=[root for _, root in roots(model)],
        mesh=mesh or two_ranks(),
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


def refused(act, kind=Exception):
    try:
        act()
    except kind as error:
        return str(error)
    raise AssertionError("nothing was refused")


def reads():
    model, plain = Net(), Net()
    keys = list(model.state_dict())
    record = done(model)
    outside = model.first.weight
    with record.gathering.reading(whole=True):
        within = model.first.weight
    return {
        "keys": list(model.state_dict()) == keys,
        "outside is the parameter": outside
        is model._parameters.get("x", dict(model.named_parameters())["first.weight"]),
        "outside": (type(outside.data).__name__, tuple(outside.to_local().shape)),
        "within": torch.equal(within.detach(), plain.first.weight),
        "class": (type(model.first).__name__, isinstance(model.first, nn.Linear)),
        "replicated": list(record.replicated),
        "known": (is_parametrised(model), is_parametrised(plain), parametrised(model) is record, is_sharded(model)),
        "leaf": (within.is_leaf, within.requires_grad),
    }


def uneven(dtype):
    model = nn.Module()
    model.first, model.odd, model.table = nn.Linear(4, 1), nn.Linear(3, 3), nn.Embedding(5, 4)
    model.large = nn.Embedding(2**10 + 1, 2**10)
    gathering = done(model, param_dtype=dtype).gathering
    with gathering.reading(whole=True):
        types = {model.first.bias.dtype, model.odd.weight.dtype, model.table.weight.dtype}
        output = model.first(torch.ones(1, 4, dtype=dtype)).dtype
    places = {name: getattr(p.placements[0], "dim", None) for name, p in model.named_parameters()}
    return types, output, places, parametrised(model).replicated.keys() == {n for n, d in places.items() if d is None}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_what_cannot_be_shared_alike_stays_whole(ranks, dtype):
    types, output, places, reported = ranks(uneven, dtype)
    assert types == {dtype or torch.float32}
    assert output == dtype or dtype is None
    assert places == {
        "first.weight": None, "first.bias": None, "odd.weight": None, "odd.bias": None, "table.weight": None,
        "large.weight": 1,
    }  # fmt: skip
    assert reported


def test_a_read_gives_the_shard_or_the_whole(ranks):
    assert ranks(reads) == {
        "keys": True,
        "outside is the parameter": True,
        "outside": ("DTensor", (2, 4)),
        "within": True,
        "class": ("Linear", True),
        "replicated": ["scale"],
        "known": (True, False, True, False),
        "leaf": (False, True),
    }


def alike():
    model = Net()
    torch.manual_seed(dist.get_rank())
    for p in model.parameters():
        nn.init.normal_(p)
    torch.manual_seed(0)
    expected = [torch.empty_like(p).normal_() for p in model.parameters()]
    done(model)
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return [torch.equal(a.detach(), b) for a, b in zip(whole, expected, strict=True)]


def test_every_rank_starts_from_the_first_ones_values(ranks):
    assert all(ranks(alike))


def gradients(dtype, reduce):
    model, plain = Net(), Net()
    record = done(model, param_dtype=dtype, reduce_dtype=reduce)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    with record.gathering.reading(whole=True):
        model(x).float().square().mean().backward()
    plain(x).square().mean().backward()
    own, wanted = {}, {}
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        if isinstance(p, DTensor):
            dist.all_reduce(q.grad)
            own[name], wanted[name] = p.grad.full_tensor(), q.grad / 2
            assert p.grad.placements == p.placements
            assert p.grad.dtype is torch.float32
    return own, wanted


@pytest.mark.parametrize(("dtype", "reduce", "tolerance"), [(None, None, 1e-6), (torch.bfloat16, torch.float32, 5e-2)])
def test_gradients_are_averaged_and_sharded(ranks, dtype, reduce, tolerance):
    own, wanted = ranks(gradients, dtype, reduce)
    assert len(own) == 3
    for name, gradient in wanted.items():
        torch.testing.assert_close(own[name], gradient, rtol=tolerance, atol=tolerance)


def flags():
    model = Net()
    model.first.requires_grad_(False)
    model.second.weight = model.first.weight  # tied, and frozen with it
    model.extra = nn.Linear(4, 4)
    model.other = nn.Linear(4, 4)
    model.other.weight = model.extra.weight
    model.extra.weight.mark = "kept"
    record = done(model)
    with record.gathering.reading(whole=True):
        frozen = model.first.weight.requires_grad
        (model.extra.weight * 2 + model.other.weight).sum().backward()
    return {
        "frozen": (model.first.weight.requires_grad, model.first.bias.requires_grad, frozen),
        "tied": model.extra.weight is model.other.weight and model.first.weight is model.second.weight,
        "names": [name for name, _ in model.named_parameters()],
        "gradient": model.extra.weight.grad.full_tensor().unique().tolist(),
        "mark": model.extra.weight.mark,
    }


def test_frozen_stay_frozen_and_tied_stay_tied(ranks):
    assert ranks(flags) == {
        "frozen": (False, False, False),
        "tied": True,
        "names": ["scale", "first.weight", "first.bias", "extra.weight", "extra.bias", "other.bias"],
        "gradient": [3.0],
        "mark": "kept",
    }


def copies():
    model = Net()
    record = done(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.first.weight.fill_(7.0)
    x = torch.ones(1, 4)
    with record.gathering.reading(whole=True):
        own, other = model.first.weight, twin.first.weight
        different = not torch.equal(model(x), twin(x))
    called = twin(x).shape  # by itself: the hooks came along
    return own.unique().numel() > 1, other.unique().tolist(), different, tuple(called), record.gathering.active


def test_a_copy_has_weights_of_its_own(ranks):
    assert ranks(copies) == (True, [7.0], True, (1, 4), False)


def nested():
    model = Net()
    gathering = done(model).gathering
    kinds = []

    def look():
        kinds.append(isinstance(model.first.weight, DTensor))

    look()
    with gathering.reading(whole=True):
        look()
        with shards_of(model):
            look()
            with shards_of(model):
                look()
            look()
            with gathering.reading(whole=True):
                look()
            look()
        look()
    look()
    try:
        with gathering.reading(whole=True):
            raise KeyError
    except KeyError:
        look()
    return kinds


def test_switches_nest_and_come_off_after_an_error(ranks):
    assert ranks(nested) == [True, False, True, True, True, False, True, False, True, True]


def two_models():
    half, full, copied = Net(), Net(), Net()
    mesh = build_mesh("cpu", MeshSizes(replicate=2, shard=1, tensor=1))
    records = [done(half, param_dtype=torch.bfloat16), done(full), done(copied, mesh)]
    types = []
    for model, record in zip((half, full, copied), records, strict=True):
        with record.gathering.reading(whole=True):
            types.append(
                (
                    model.first.weight.dtype,
                    [type(p).__name__ for p in dict(model.named_parameters())["first.weight"].placements],
                )
            )
    with records[0].gathering.reading(whole=True):
        apart = isinstance(full.first.weight, DTensor)
    return types, apart, type(half.first) is type(full.first)


def test_two_models_of_one_class_have_settings_of_their_own(ranks):
    types, apart, same = ranks(two_models)
    assert types == [
        (torch.bfloat16, ["Shard"]),
        (torch.float32, ["Shard"]),
        (torch.float32, ["Replicate", "Shard"]),
    ]
    assert apart
    assert not same


def types_of():
    model = nn.Module()
    model.norm, model.linear = nn.BatchNorm1d(4), nn.Linear(4, 4)
    model.wide, model.phase = nn.Linear(4, 4, dtype=torch.float64), nn.Parameter(torch.zeros(4, dtype=torch.complex64))
    record = done(model, param_dtype=torch.bfloat16)
    with record.gathering.reading(whole=True):
        return [t.dtype for t in (model.norm.weight, model.linear.weight, model.wide.weight, model.phase)]


def test_only_what_computes_in_the_type_is_gathered_in_it(ranks):
    assert ranks(types_of) == [torch.float32, torch.bfloat16, torch.float64, torch.complex64]


WRITES = {
    "in place": lambda w: w.mul_(0.5),
    "data": lambda w: w.data.zero_(),
    "detached": lambda w: w.detach().add_(1),
    "init": nn.init.zeros_,
    "view": lambda w: w[0].zero_(),
}


def written(name):
    model = Net()
    gathering = done(model).gathering
    with gathering.reading(whole=True), torch.no_grad():
        WRITES[name](model.second.weight)
    message = refused(lambda: gathering.check_unwritten(model), RuntimeError)
    gathering.check_unwritten(model)  # said once
    with gathering.reading(whole=True):
        model.second.weight.data.sum()  # reading is fine
    gathering.check_unwritten(model)
    with torch.no_grad():
        before = model.second.weight.full_tensor().clone()
        model.second.weight.mul_(2)
        with gathering.reading(whole=True), shards_of(model):
            model.second.weight.mul_(2)
    return message, torch.equal(model.second.weight.full_tensor(), before * 4)


@pytest.mark.parametrize("name", WRITES)
def test_a_write_is_kept_outside_a_step_and_refused_within(ranks, name):
    message, kept = ranks(written, name)
    assert message.startswith("second.weight was written to within a step")
    assert kept


def others():
    model = Net()
    gathering = done(model).gathering

    def set_whole():
        model.first.weight = nn.Parameter(torch.zeros(4, 4))

    def set_data():
        with gathering.reading(whole=True):
            model.first.weight.data = torch.zeros(4, 4)

    texts = [refused(set_whole, ValueError), refused(set_data, RuntimeError)]
    model.first.weight = model.first.weight  # a shard may be set
    with torch.no_grad(), shard_data_written():
        model.second.weight[:] = torch.full((4, 4), 3.0)  # as the message says
        model.scale.fill_(3.0)
    assert model.second.weight.full_tensor().unique().tolist() == [3.0]
    with gathering.reading(whole=True):
        model(torch.ones(1, 4)).sum().backward()
        grad = model.first.weight.grad
        model.first.weight.grad = None
    del model.second.weight
    return texts, type(grad).__name__, model.first.weight.grad, hasattr(model.second, "weight")


def test_a_whole_tensor_in_the_place_of_a_shard_is_refused(ranks):
    texts, grad, cleared, left = ranks(others)
    assert texts[0].startswith("weight of a Linear is sharded and was set to an unsharded tensor.")
    assert "module.weight[:] = values" in texts[0]
    assert texts[1].startswith("A parameter was written to within a step")
    assert (grad, cleared, left) == ("DTensor", None, False)


def called_outside():
    model = nn.Module()
    model.root = Net()
    gathering = done(model).gathering
    first = model.root(torch.ones(1, 4)).detach()
    model.root.first.register_forward_hook(lambda *_: 1 / 0)
    refused(lambda: model.root(torch.ones(1, 4)), ZeroDivisionError)
    return torch.equal(first, Net()(torch.ones(1, 4)).detach()), gathering.active, gathering._before


def test_a_root_that_is_called_outside_a_step_gathers(ranks):
    assert ranks(called_outside) == (True, False, [])


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


def written_compiled(how):
    from lightning_ups.transforms.compile.compiler import compiled
    from lightning_ups.transforms.compile.frame import Compiler

    model = nn.Module()
    model.root = Writes(how)
    gathering = done(model).gathering
    compiler = Compiler(backend="aot_eager", fullgraph=True)
    with (
        prepared(GatherPlan.of([], ["root"], recompute=True, key=how)),
        compiled({"root": model.root}, compiler),
        gathering.reading(whole=True),
    ):
        if how == "not":
            return str(model.root(torch.ones(1, 4)).shape)
        return refused(lambda: model.root(torch.ones(1, 4)), RuntimeError)


@pytest.mark.parametrize("how", ["in place", "data", "view", "not"])
def test_a_write_in_a_compiled_forward_is_refused(ranks, how):
    text = ranks(written_compiled, how)
    assert ("writes to a parameter within its forward" in text) is (how != "not")


def impossible(name):
    if name == "norm of rows":
        model = nn.ModuleDict({"table": nn.Embedding(4, 2, max_norm=1.0)})
    elif name == "sparse gradients":
        model = nn.ModuleDict({"table": nn.Embedding(4, 2, sparse=True)})
    elif name == "lazy":
        model = nn.Sequential(nn.LazyLinear(2))
    elif name == "one memory":
        model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
        model["b"].weight.data = model["a"].weight.data
    elif name == "script":
        model = nn.ModuleDict({"traced": torch.jit.script(nn.Linear(2, 2))})
    elif name in ("hook", "hook after"):
        weight = (model := Net()).first.weight
        weight.register_hook(torch.sign) if name == "hook" else weight.register_post_accumulate_grad_hook(print)
    else:
        model = Net()
        done(model)
    if name == "settings":
        return refused(lambda: done(model, param_dtype=torch.bfloat16), ValueError)
    if name == "fsdp2":
        return refused(lambda: shard(model, blocks={}, roots=[], mesh=two_ranks(), options=ShardOptions()), ValueError)
    if name == "copied":
        return refused(lambda: done(copy.deepcopy(model)), ValueError)
    return refused(lambda: done(model), ValueError)


TEXTS = {
    "norm of rows": "table has max_norm=1.0: it scales rows",
    "sparse gradients": "table has sparse=True",
    "hook": "first.weight has a gradient hook",
    "hook after": "first.weight has a hook that runs when its gradient has been accumulated",
    "lazy": "has no shape yet",
    "one memory": "a.weight and b.weight are two parameters that share memory",
    "script": "is a module of TorchScript",
    "settings": "param_dtype=None, and this run asks for param_dtype=torch.bfloat16",
    "fsdp2": "sharded by an earlier run with another strategy",
    "copied": "was sharded before the strategy could",
}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_is_refused(ranks, name):
    assert TEXTS[name] in ranks(impossible, name)


def frozen_within():
    model = Net()
    gathering = done(model).gathering
    seen = []
    with gathering.reading(whole=True):
        seen.append(model.first.weight.requires_grad)
        with torch.no_grad():
            model.first.weight.requires_grad = False
        seen.append(model.first.weight.requires_grad)
        model.first.bias.requires_grad_(False).requires_grad_()
        model.second.weight.requires_grad_(False)
    return seen, [name for name, p in model.named_parameters() if p.requires_grad]


def test_what_is_frozen_within_a_step_is_the_shard(ranks):
    assert ranks(frozen_within) == ([True, False], ["scale", "first.bias"])


def again():
    model = Net()
    first = done(model)
    return done(model) is first, len(model._forward_pre_hooks)


def test_the_same_again_is_kept(ranks):
    assert ranks(again) == (True, 1)


def after_an_exception():
    model = Net()
    gathering = done(model).gathering
    try:
        with gathering.reading(whole=True), torch.no_grad():
            model.first.weight.zero_()
            raise KeyError
    except KeyError:
        pass
    again = done(model).gathering
    again.check_unwritten(model)
    return again is gathering


def test_a_write_in_a_step_that_failed_is_not_held_against_the_next_run(ranks):
    assert ranks(after_an_exception)


def held_after_calls():
    model, seen = nn.Module(), []
    model.root = Net()
    gathering = done(model).gathering
    model.root.first.register_forward_hook(lambda layer, *_: seen.append(weakref.ref(layer.weight)))
    with torch.no_grad():
        for _ in range(2):
            model.root(torch.ones(1, 4))
        outside = [ref() is not None for ref in seen]
        with gathering.reading(whole=True):
            model.root(torch.ones(1, 4))
            within = seen[-1]() is not None
        gathering.check_unwritten(model)
    return outside, within, seen[-1]() is not None


def test_what_a_call_outside_a_step_gathered_is_not_kept(ranks):
    assert ranks(held_after_calls) == ([False, False], True, False)


def noted():
    """What two models note: of one nothing but scalars is gathered, so that a device may call it alone."""
    model = nn.Module()
    model.root, model.other, model.scale = Net(), Net(), nn.Module()
    model.scale.weight = nn.Parameter(torch.tensor(1.0))
    gathering = done(model).gathering
    marks = [gathering.noted]

    def note(act, *, training=True):
        with gathering.reading(whole=True), gathering.noting(training=training):
            act()
        marks.append(gathering.noted)

    note(lambda: model.scale.weight)
    note(lambda: model.root(torch.ones(1, 4)), training=False)
    model.root(torch.ones(1, 4))
    marks.append(gathering.noted)
    unchanged = len(set(marks)) == 1
    orders = []
    for first, second in ((model.root, model.other), (model.other, model.root), (model.root, model.other)):
        gathering.noted = 0
        note(lambda first=first, second=second: second(first(torch.ones(1, 4))))
        orders.append(marks[-1])
    gathering.noted = 0
    note(lambda: model.root.first.weight)
    read = marks[-1] != 0
    return unchanged, orders[0] != orders[1], orders[0] == orders[2], read, list(gathering.names.values())


def noted_of_copies():
    model = nn.Module()
    model.root = Net()
    gathering = done(model, build_mesh("cpu", MeshSizes(replicate=2, shard=1, tensor=1))).gathering
    with gathering.reading(whole=True), gathering.noting(training=True):
        model.root(torch.ones(1, 4))
    return gathering.noted


def test_of_copies_a_device_may_run_one_alone(ranks):
    assert ranks(noted_of_copies) == 0


def test_what_devices_must_do_alike_is_noted_in_its_order(ranks):
    assert ranks(noted) == (True, True, True, True, ["root", "other"])


def written_in_a_call():
    model = nn.Module()
    model.root = Writes("in place")
    done(model)
    return refused(lambda: model.root(torch.ones(1, 4)), RuntimeError)


def test_a_write_in_a_call_outside_a_step_is_refused(ranks):
    assert ranks(written_in_a_call).startswith("inner.weight was written to within a step")
