import copy
from collections import Counter
from contextlib import contextmanager, nullcontext
from unittest.mock import patch

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import fx, nn
from torch._inductor import config  # noqa: TID251
from torch._inductor.compile_fx import compile_fx  # noqa: TID251
from torch._inductor.fx_passes import bucketing  # noqa: F401, TID251  (defines the operator)
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F  # noqa: N812

from lightning_ups._compat.torch.compile import graph_passes
from lightning_ups._compat.torch.compile.graph_passes import (
    cast_where_copied,
    find_maxima_apart,
    find_where_written,
    leaner_casts,
    leave_out_clamps,
    pieces,
)
from lightning_ups.kernels.float8_casts import maxima, row_order
from lightning_ups.transforms.float8 import compiler_settings, float8_swap
from lightning_ups.transforms.float8 import recipes as float8
from tests.compiled_afresh import compiled_afresh
from tests.interpreted import assert_equal_with_triton
from tests.kernels.test_float8_casts import assert_same

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")]
aten, prims = torch.ops.aten, torch.ops.prims


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


def assert_same_results(actual, expected):
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
    assert_same_results(outputs(graph, fill=drawn), outputs(graphs["joint"], fill=drawn))


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
    assert_same_results(outputs(graph, fill=fill), outputs(graphs["joint"], fill=fill))


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
        (lambda call, x, other: cast(call, x, x, largest=4480.0), 1),
        (lambda call, x, other: cast(call, x, x, bound=100.0), 1),
        (lambda call, x, other: cast(call, x, x, least=1e-40), 1),
        (lambda call, x, other: cast(call, x, x, of_scale=torch.float16), 1),
    ],
    ids=[
        "its own",
        "in another shape",
        "another's",
        "too large",
        "a lower bound",
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
    assert_same_results(outputs(graph, fill=drawn), outputs(graphs["forward"], fill=drawn))


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
    assert_same_results(actual, expected)
    assert kept.graphs
    assert sum(map(clamps, kept.graphs)) == 0
    assert config.joint_custom_pre_pass is config.post_grad_custom_pre_pass is None


def rms(x):
    return x * torch.rsqrt(aten.mean.dim(x * x, [-1], True) + 1e-5)


def graph_with_maxima(compute, *shapes):
    """Return the graph of the maxima of what is computed of tensors without values, as a matrix."""

    def forward(*inputs):
        value = compute(*inputs)
        return maxima(value.reshape(-1, value.shape[-1]))

    with FakeTensorMode():
        return make_fx(forward)(*(torch.empty(shape, dtype=torch.bfloat16) for shape in shapes)).graph


def pieces_in(graph):
    (node,) = graph.find_nodes(op="call_function", target=maxima)
    return pieces(node.args[0])


FLAT, DEEP = (2048, 3072), (2, 1024, 3072)


@pytest.mark.parametrize(
    ("compute", "shapes", "wanted"),
    [
        (lambda a, b: aten.sigmoid(a) * b, (FLAT, FLAT), (2048, 3, 1024)),
        (lambda a, b: aten.sigmoid(a) * b, (DEEP, DEEP), (2, 1024, 3, 1024)),
        (lambda a: -a, ((2048, 768),), (2048, 3, 256)),
        (lambda a: -a, ((2048, 2064),), (2048, 2064)),  # 129 * 16: pieces would be short
        (rms, (FLAT,), (2048, 3072)),
        (lambda a, b: b + rms(a).to(torch.float32).to(torch.bfloat16), (DEEP, DEEP), DEEP),
        (lambda a: a.transpose(1, 2).cos().transpose(1, 2).contiguous(), (DEEP,), (2, 1024, 3, 1024)),
    ],
    ids=[
        "a product",
        "of three dimensions",
        "768",
        "2064",
        "a norm",
        "a sum",
        "turned around",
    ],
)
def test_pieces_of_what_inductor_writes(compute, shapes, wanted):
    assert pieces_in(graph_with_maxima(compute, *shapes)) == wanted


@pytest.mark.parametrize(
    ("compute", "shapes"),
    [
        (lambda a: a, (FLAT,)),
        (aten.mm, (FLAT, (3072, 1024))),
        (lambda a, b: torch.cat([a, b], dim=-1), (FLAT, FLAT)),
        (lambda a: rms(a.view(2, 1024, 48, 64)).reshape(2, 1024, -1), (DEEP,)),
        (rms, ((1000, 3072),)),
    ],
    ids=[
        "an input",
        "a product's kernel",
        "joined",
        "norms of heads",
        "few rows",
    ],
)
def test_the_rest_is_left_to_the_kernel(compute, shapes):
    graph = graph_with_maxima(compute, *shapes)
    assert pieces_in(graph) is None
    before = [node.target for node in graph.nodes]
    find_where_written(graph, maxima)
    assert [node.target for node in graph.nodes] == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("compute", [torch.neg, rms], ids=["pieces", "rows"])
@pytest.mark.parametrize("value", [None, 0.0, -0.0, float("nan"), float("inf"), -float("inf"), 3e38, 1e-40])
def test_casts_have_the_same_bits(monkeypatch, compute, dtype, value):
    monkeypatch.setattr(graph_passes, "FEWEST", 8)

    def cast(x):
        values = compute(x)
        return row_order(values, maxima(values), torch.float8_e4m3fn)

    x = torch.randn(16, 256, generator=torch.Generator().manual_seed(1)).to(dtype)
    if value is not None:
        x[3, 5] = value
        x[7] = value
        x[value == 0 :] *= 1 if value else value
    before = make_fx(cast)(x)
    after = copy.deepcopy(before)
    find_where_written(after.graph, maxima)
    after.graph.lint()
    after.recompile()
    assert after.graph.find_nodes(op="call_function", target=aten.amax.default)
    assert_same(after(x), before(x))


class Gated(nn.Module):
    """What makes matrices in blocks: a norm, SwiGLU behind biases."""

    def __init__(self):
        super().__init__()
        swap = float8_swap("tensorwise")
        self.norm = nn.RMSNorm(128)
        self.gate, self.up, self.down = (swap(nn.Linear(n, m)) for n, m in ((128, 256), (128, 256), (256, 128)))

    def forward(self, x):
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


@contextmanager
def by_kernels_alone():
    """Open the settings as they are but for what looks for maxima elsewhere."""
    with patch.object(float8, "maxima_where_written", nullcontext), compiler_settings("tensorwise"):
        yield


def trained_once(build, settings):
    torch.manual_seed(0)
    net, seen = build().bfloat16(), []
    x = torch.randn(4, 16, 128).bfloat16().requires_grad_()
    with settings, compiled_afresh(post_grad_custom_post_pass=seen.append):
        out = torch.compile(net, fullgraph=True)(x)
        out.float().square().sum().backward()
    found = sum(len(graph.find_nodes(op="call_function", target=aten.amax.default)) for graph in seen)
    return found, [out.detach(), x.grad, *(parameter.grad for parameter in net.parameters())]


def test_compiled_training_has_the_same_bits(monkeypatch):
    monkeypatch.setattr(graph_passes, "FEWEST", 8)
    none, wanted = trained_once(Gated, by_kernels_alone())
    found, values = trained_once(Gated, compiler_settings("tensorwise"))
    assert none == 0
    assert found == 2 + 2  # norms and SwiGLU; the gradients of what up and gate give
    for one, other in zip(values, wanted, strict=True):
        assert torch.equal(one, other)


SCHEDULED = """
import re
from tests._compat.torch.compile.test_graph_passes import by_kernels_alone, feed
from lightning_ups.transforms.float8 import compiler_settings, float8_swap
from tests.compiled_for_cuda import scheduled

def read(graph):
    return [int(size) for size in re.findall(r"maxima_kernel\\w*\\.run\\(.*?, (\\d+), 1024, 1, 1", graph.code)]

build, shape, wanted = feed(float8_swap("tensorwise"))
before = scheduled(build, shape, by_kernels_alone)
after = scheduled(build, shape, lambda: compiler_settings("tensorwise"))
assert len(before) == len(after) == len(wanted) == 2
for one, other, sizes in zip(before, after, wanted):
    assert sorted(read(one)) == sorted(size for size, _ in sizes), (read(one), sizes)
    assert sorted(read(other)) == sorted(size // length for size, length in sizes), (read(other), sizes)
    saved = 2 * sum(size for size, length in sizes if length > 1)
    assert 0.99 * saved <= one.num_bytes - other.num_bytes <= saved, (one.num_bytes, other.num_bytes, saved)
print("equal")
"""


def test_on_a_gpu_a_matrix_is_read_once_less():
    assert_equal_with_triton(SCHEDULED)


def feed(swap):
    """Return what builds a block, its input's shape, and of each maximum the size of its matrix and of pieces.

    Pieces of one value are none: the kernel looks for that maximum. The first list is of forward.
    """
    m, d, n = 4096, 2048, 3072

    class Feed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.RMSNorm(d)
            self.gate, self.up = (swap(nn.Linear(d, n, bias=False)) for _ in range(2))
            self.down = swap(nn.Linear(n, d, bias=False))

        def forward(self, x):
            h = self.norm(x)
            return x + self.down(F.silu(self.gate(h)) * self.up(h))

    weights = [(d * n, 1)] * 3
    return Feed, (2, m // 2, d), ([*weights, (m * d, d), (m * n, 1024)], [(m * d, 1), *[(m * n, 1024)] * 2])


def swapped(net, swap):
    for module in [*net.modules()]:
        for name, child in [*module.named_children()]:
            if isinstance(child, nn.Linear):
                setattr(module, name, swap(child))
    return net


@pytest.mark.gpu(capability=(8, 9))
def test_compiled_training_on_a_gpu_is_rounded_alike(monkeypatch):
    monkeypatch.setattr(graph_passes, "FEWEST", 8)

    class SwiGLU(nn.Module):  # without a norm, whose sum may be of other blocks
        def __init__(self):
            super().__init__()
            self.gate, self.up, self.down = (nn.Linear(n, m) for n, m in ((256, 512), (256, 512), (512, 256)))

        def forward(self, x):
            return self.down(F.silu(self.gate(x)) * self.up(x))

    def trained_on_gpu(settings):
        torch.manual_seed(0)
        net = swapped(SwiGLU().cuda().bfloat16(), float8_swap("tensorwise"))
        x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        torch.compiler.reset()
        with settings, config.patch(fx_graph_cache=False):
            out = torch.compile(net, fullgraph=True)(x)
            out.float().square().sum().backward()
        return [out.detach(), x.grad, *(parameter.grad for parameter in net.parameters())]

    # Not of the same bits: another kernel writes the product, whose last digit may differ; float8 rounds to eighths.
    wanted = trained_on_gpu(by_kernels_alone())
    for one, other in zip(trained_on_gpu(compiler_settings("tensorwise")), wanted, strict=True):
        assert (one - other).float().norm() < 2e-2 * other.float().norm()


HALF, FULL = torch.bfloat16, torch.float32


def cast_gradients(tensor):
    return torch.ops.prims.convert_element_type.default(tensor, FULL)


def count(graph, operator):
    return len(graph.graph.find_nodes(op="call_function", target=operator))


def together(*gradients):
    return torch.ops.bucketing._pre_bucket_reduce_scatter.default([*gradients], 2)


def alone(a, b):
    return together(cast_gradients(a.mm(a.t())), b)


def needed_elsewhere(a, b):
    product = cast_gradients(a.mm(a.t()))
    return together(product, b) + product.sum()


def turned(a, b):
    return together(cast_gradients(a.mm(a.t()).t()).contiguous(), b)


def computed_with_its_cast(a, b):
    return together(cast_gradients(a * 2), b)


@pytest.mark.parametrize(
    ("function", "casts"), [(alone, 0), (needed_elsewhere, 1), (turned, 1), (computed_with_its_cast, 1)]
)
def test_a_cast_that_nothing_else_needs_is_left_to_the_copy(function, casts):
    a, b = torch.randn(4, 6, dtype=HALF), torch.randn(2, 3)
    right = function(a, b)
    graph = make_fx(function, tracing_mode="fake")(a, b)
    cast_where_copied(graph.graph)
    graph.graph.lint()
    graph.recompile()
    assert count(graph, torch.ops.prims.convert_element_type.default) == casts
    assert count(graph, torch.ops.lightning_ups.reduce_scatter_input.default) == 1 - casts
    assert torch.equal(graph(a, b), right)
    assert right.dtype == FULL


def test_gradients_in_another_order_of_memory_are_copied_together():
    def function(a, b):
        return together(a, b)

    a, b = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last), torch.randn(2, 3)
    graph = make_fx(function, tracing_mode="fake")(a.contiguous(), b)
    cast_where_copied(graph.graph)
    graph.recompile()
    assert torch.equal(graph(a, b), function(a.contiguous(), b))


def test_the_operator_is_one_that_compilers_can_trace():
    operator = torch.ops.lightning_ups.reduce_scatter_input.default
    arguments = ([torch.randn(4, 3, dtype=HALF), torch.randn(2)], 2, FULL)
    torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))
    parts = operator(*arguments).view(2, -1)
    assert torch.equal(parts[1], torch.cat([arguments[0][0][2:].float().flatten(), arguments[0][1][1:]]))
