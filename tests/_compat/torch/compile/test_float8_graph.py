import copy
from collections import Counter

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import fx, nn
from torch._inductor import config  # noqa: TID251
from torch._inductor.compile_fx import compile_fx  # noqa: TID251
from torch.nn import functional as F  # noqa: N812

from lightning_ups._compat.torch.compile.float8_graph import find_maxima_apart, leaner_casts, leave_out_clamps
from lightning_ups.transforms.float8.convert import float8_swap
from tests.compiled_afresh import compiled_afresh

aten, prims = torch.ops.aten, torch.ops.prims

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")]


class SwiGLU(nn.Module):
    """Joins what two layers give, as attention joins queries, keys and values."""

    def __init__(self, recipe="tensorwise"):
        super().__init__()
        swap = float8_swap(recipe, emulate=True)
        self.gate, self.up, self.down = (swap(nn.Linear(32, 32, bias=False).bfloat16()) for _ in range(3))
        self.joined = swap(nn.Linear(64, 32, bias=False).bfloat16())

    def forward(self, x):
        h = self.down(F.silu(self.gate(x)) * self.up(x))
        return self.joined(torch.cat([h.sin(), x], dim=-1))


class Joined(nn.Module):
    """Multiplies what it makes, and what it joins: as few kernels as have each way to cast."""

    def __init__(self):
        super().__init__()
        swap = float8_swap("tensorwise", emulate=True)
        self.gate = swap(nn.Linear(32, 32, bias=False).bfloat16())
        self.joined = swap(nn.Linear(64, 32, bias=False).bfloat16())

    def forward(self, x):
        return self.joined(torch.cat([F.silu(self.gate(x)), x], dim=-1))


class Kept:
    """Keeps a copy of each graph."""

    def __init__(self):
        self.graphs = []

    def __call__(self, graph):
        self.graphs.append(copy.deepcopy(graph))


def trained(net, *, backend="inductor"):
    torch.manual_seed(1)
    x = torch.randn(16, 32).bfloat16().requires_grad_()
    out = torch.compile(net, backend=backend, fullgraph=True)(x)
    out.float().pow(2).sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in net.parameters())]


@pytest.fixture(scope="module")
def graphs():
    """Return the graphs that inductor gets of the module as it is."""
    kept = Kept()

    def keep(graph, *_, **__):  # in place of the kernels that inductor would make of it
        kept(graph.graph)
        return make_boxed_func(graph.forward)

    with compiled_afresh(joint_custom_pre_pass=kept):
        trained(SwiGLU(), backend=lambda graph, inputs: compile_fx(graph, inputs, inner_compile=keep))
    return dict(zip(("joint", "forward", "backward"), kept.graphs, strict=True))


def counted(graph):
    return Counter(node.target for node in graph.nodes)


def clamps(graph):
    return counted(graph)[aten.clamp_max.default]


def outputs(graph, *, fill):
    """Return what ``graph`` computes from values that ``fill`` makes of each placeholder's."""
    torch.manual_seed(2)
    with torch.no_grad():
        arguments = [fill(node.meta["val"]) for node in graph.nodes if node.op == "placeholder"]
        return fx.Interpreter(fx.GraphModule(nn.Module(), graph)).run(*arguments, enable_io_processing=False)


def drawn(val):
    if not isinstance(val, torch.Tensor):
        return val
    return torch.randn(tuple(val.shape)).to(val.dtype) if val.dim() else torch.tensor(0.7).to(val.dtype)


def assert_same(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        if isinstance(e, torch.Tensor):
            as_bytes = (t.contiguous().view(torch.uint8) if t.dim() else t for t in (a, e))
            assert torch.equal(*as_bytes) or (
                torch.equal(a.float().isnan(), e.float().isnan())
                and torch.equal(a.float().nan_to_num(), e.float().nan_to_num())
            )


def test_no_clamp_is_left_and_all_values_are_the_same(graphs):
    graph = copy.deepcopy(graphs["joint"])
    assert clamps(graph) >= 12
    leave_out_clamps(graph)
    assert clamps(graph) == 0
    graph.lint()
    assert_same(outputs(graph, fill=drawn), outputs(graphs["joint"], fill=drawn))


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 0.0, 1e-30, 3e38])
def test_what_cannot_be_scaled_well_is_cast_as_before(graphs, value):
    def fill(val):
        made = drawn(val)
        if isinstance(made, torch.Tensor) and made.dim() == 2:
            made = made.clone() if value > 1 or value != value else torch.zeros_like(made)
            made[0, 0] = value
        return made

    graph = copy.deepcopy(graphs["joint"])
    leave_out_clamps(graph)
    find_maxima_apart(graph)
    assert_same(outputs(graph, fill=fill), outputs(graphs["joint"], fill=fill))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_rounding_of_a_maximum_stays_in_range(dtype):
    largest = torch.finfo(dtype).max
    values = torch.arange(1, 2**15, dtype=torch.int16).view(torch.bfloat16)
    values = values[values.isfinite() & (values > 1e-12)]
    scale = (largest * values.double().reciprocal()).float()
    room = {torch.float8_e4m3fn: 464.0, torch.float8_e5m2: 61440.0}[
        dtype
    ]  # half a step above: from here on it overflows
    for off in (1 - 2**-8, 1.0, 1 + 2**-8):
        scaled = values.float() * off * scale
        assert scaled.max() < room
        assert torch.equal(scaled.to(dtype).float(), scaled.clamp(-largest, largest).to(dtype).float())


def graph_of(build):
    graph = fx.Graph()
    x, other = graph.placeholder("x"), graph.placeholder("other")
    x.meta["val"], other.meta["val"] = torch.zeros(4, 16).bfloat16(), torch.zeros(4, 16).bfloat16()

    def call(target, *args):
        node = graph.call_function(target, args)
        node.meta["val"] = target(*(a.meta["val"] if isinstance(a, fx.Node) else a for a in args))
        return node

    graph.output((build(call, x, other),))
    return graph


def cast(call, x, by, *, largest=448.0, bound=448.0, least=1e-12, of_scale=torch.float32):
    maximum = call(aten.max.default, call(aten.abs.default, by))
    wide = call(prims.convert_element_type.default, maximum, torch.float64)
    factor = call(aten.mul.Tensor, call(aten.reciprocal.default, call(aten.clamp_min.default, wide, least)), largest)
    scale = call(prims.convert_element_type.default, factor, of_scale)
    scaled = call(aten.mul.Tensor, call(prims.convert_element_type.default, x, torch.float32), scale)
    clamped = call(aten.clamp_max.default, call(aten.clamp_min.default, scaled, -bound), bound)
    return call(prims.convert_element_type.default, clamped, torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("build", "left"),
    [
        (lambda call, x, other: cast(call, x, x), 0),
        (lambda call, x, other: cast(call, x, call(aten.view.default, x, [64])), 0),
        (lambda call, x, other: cast(call, x, other), 1),
        (lambda call, x, other: cast(call, x, call(aten.mul.Tensor, x, 0.5)), 1),
        (lambda call, x, other: cast(call, x, x, largest=4480.0), 1),
        (lambda call, x, other: cast(call, x, x, bound=100.0), 1),
        (lambda call, x, other: cast(call, x, call(aten.slice.Tensor, x, 0, 0, 2)), 1),
        (lambda call, x, other: cast(call, x, x, least=1e-40), 1),
        (lambda call, x, other: cast(call, x, x, of_scale=torch.float16), 1),
    ],
    ids=[
        "its own",
        "in another shape",
        "another's",
        "half of it",
        "too large",
        "a lower bound",
        "a part of it",
        "a maximum of nearly nothing",
        "a rough scale",
    ],
)
def test_a_clamp_goes_only_where_its_own_maximum_scales(build, left):
    graph = graph_of(build)
    leave_out_clamps(graph)
    assert clamps(graph) == left


def test_what_is_joined_is_looked_through_in_its_parts(graphs):
    graph = copy.deepcopy(graphs["forward"])
    before = counted(graph)
    find_maxima_apart(graph)
    after = counted(graph)
    assert after[aten.max.default] == before[aten.max.default] + 1
    assert after[aten.maximum.default] == before[aten.maximum.default] + 1
    joined = graph.find_nodes(op="call_function", target=aten.cat.default)
    assert joined
    assert not any(user.target is aten.abs.default for node in joined for user in node.users)
    graph.lint()
    assert_same(outputs(graph, fill=drawn), outputs(graphs["forward"], fill=drawn))


def test_what_may_be_empty_has_its_maximum_where_it_was():
    graph = fx.Graph()
    x, empty = graph.placeholder("x"), graph.placeholder("empty")
    x.meta["val"], empty.meta["val"] = torch.ones(4, 16), torch.ones(0, 16)
    joined = graph.call_function(aten.cat.default, ([x, empty],))
    joined.meta["val"] = torch.ones(4, 16)
    absolute = graph.call_function(aten.abs.default, (joined,))
    graph.output((graph.call_function(aten.max.default, (absolute,)),))
    find_maxima_apart(graph)
    assert counted(graph)[aten.max.default] == 1


def test_compiled_training_is_bit_for_bit_the_same():
    torch.manual_seed(0)
    net, kept = Joined(), Kept()
    with compiled_afresh():
        expected = trained(copy.deepcopy(net))
    with compiled_afresh(), leaner_casts():
        passes = config.joint_custom_pre_pass, config.post_grad_custom_pre_pass
        assert len({passed.uuid() for passed in passes}) == 2  # known to caches, and told apart
        with config.patch(post_grad_custom_post_pass=kept):
            actual = trained(net)
    assert_same(actual, expected)
    assert kept.graphs
    assert sum(map(clamps, kept.graphs)) == 0
    assert config.joint_custom_pre_pass is config.post_grad_custom_pre_pass is None
