import inspect
from collections import Counter

import pytest
import torch
from torch import nn
from torch._higher_order_ops import triton_kernel_wrap as hop
from torch._inductor.fx_passes.post_grad import decompose_triton_kernel_wrapper_functional  # noqa: TID251
from torch._inductor.fx_passes.reinplace import reinplace_inplaceable_ops  # noqa: TID251
from torch._inductor.fx_utils import FakeTensorUpdater  # noqa: TID251
from torch._inductor.lowering import needs_realized_inputs  # noqa: TID251
from torch._inductor.virtualized import V  # noqa: TID251
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from lightning_ups._compat.torch.compile.launches import launch_directly
from lightning_ups.kernels import float8_casts_triton as kernels
from lightning_ups.kernels.float8_casts import both_orders, column_order, maxima, row_order
from lightning_ups.transforms.float8 import compiler_settings, float8_swap
from tests.interpreted import assert_equal_with_triton
from tests.kernels.test_float8_casts import assert_same

E4M3 = torch.float8_e4m3fn
OURS = [each.operator for each in kernels.OPERATORS]
aten = torch.ops.aten


def calls(x):
    found = maxima(x)
    rows, columns, inverse = both_orders(x, found, E4M3)
    more, _ = row_order(x, found, E4M3)
    last, also = column_order(x, found, E4M3)
    return rows, columns, inverse, more, last, also


def traced(device="cuda", *, shape=(48, 64), mode=None):
    mode = mode or FakeTensorMode()
    with mode:
        x = torch.empty(shape, dtype=torch.bfloat16, device=device)
        return make_fx(calls)(x)


@pytest.fixture
def without_triton(monkeypatch):
    monkeypatch.setattr(kernels, "_maxima", lambda: Kernel("maxima"))
    monkeypatch.setattr(kernels, "_cast", lambda: Kernel("cast"))
    monkeypatch.setattr(kernels, "_multiprocessors", lambda device: 132)


class Kernel:
    """What Triton would launch."""

    def __init__(self, name):
        self.name = name


def launch_all(graph):
    for each in kernels.OPERATORS:
        launch_directly(graph, each)


def targets(graph):
    return Counter(node.target for node in graph.nodes if node.op == "call_function")


@pytest.mark.usefixtures("without_triton")
def test_each_call_becomes_one_launch_that_writes_to_new_memory():
    module = traced()
    before = targets(module.graph)
    assert [before[each] for each in OURS] == [1, 1, 1, 1]
    shown = [each.meta["val"] for each in module.graph.output_node().args[0]]
    launch_all(module.graph)
    module.graph.lint()
    after = targets(module.graph)
    assert not any(after[each] for each in OURS)
    assert after[hop.triton_kernel_wrapper_functional] == 4
    assert after[aten.empty.memory_format] == 1 + 3 + 2 + 2
    found = [each.meta["val"] for each in module.graph.output_node().args[0]]
    assert [(v.shape, v.dtype, v.stride()) for v in found] == [(v.shape, v.dtype, v.stride()) for v in shown]


def test_inductor_copies_nothing_for_them(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(kernels, "_multiprocessors", lambda device: 132)
    module = traced()
    launch_all(module.graph)
    takes_module = "gm" in inspect.signature(FakeTensorUpdater).parameters
    reinplace_inplaceable_ops(FakeTensorUpdater(module if takes_module else module.graph), module.graph)
    with V.set_fake_mode(module.graph.output_node().args[0][0].meta["val"].fake_mode):
        decompose_triton_kernel_wrapper_functional(module.graph)
    module.graph.lint()
    assert hop.triton_kernel_wrapper_mutation in needs_realized_inputs  # else it makes what two launches read twice
    last = targets(module.graph)
    assert last[hop.triton_kernel_wrapper_mutation] == 4
    assert last[aten.empty.memory_format] == 8
    assert last[aten.view.default] == 3  # of what has no dimension
    assert sum(last.values()) == 15, last  # nothing else is left
    # By these inductor keeps the strides that a kernel counts on; by their order alone it would take padded rows, too.
    mutations = module.graph.find_nodes(op="call_function", target=hop.triton_kernel_wrapper_mutation)
    assert all("eager_input_vals" in node.meta for node in mutations)


@pytest.mark.usefixtures("without_triton")
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_is_on_no_gpu_stays_an_operator(device):
    module = traced(device)
    launch_all(module.graph)
    assert [targets(module.graph)[each] for each in OURS] == [1, 1, 1, 1]


MUTATIONS = """
import torch, triton
from torch._higher_order_ops.triton_kernel_wrap import get_mutated_tensors, kernel_side_table
from torch._subclasses import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from lightning_ups.kernels import float8_casts_triton as kernels, float8_row_casts_triton as by_rows
from lightning_ups.kernels.float8_casts import maxima
from lightning_ups.kernels.float8_row_casts import column_maxima, scaled_columns, scaled_rows

driver.set_active(type("Driver", (), {"get_current_target": lambda self: GPUTarget("cuda", 90, 32)})())
kernels._multiprocessors = lambda device: 132
with FakeTensorMode():
    x = torch.empty(48, 64, dtype=torch.bfloat16, device="cuda")
    e4m3, scale = torch.float8_e4m3fn, torch.empty(64, device="cuda")
    inputs = {maxima: (x,), scaled_rows: (x, e4m3), column_maxima: (x,), scaled_columns: (x, scale, e4m3)}
    for known in (*kernels.OPERATORS, *by_rows.OPERATORS):
        given = inputs.get(known.operator, (x, maxima(x), e4m3))
        made = known.operator(*given)
        launch = known.launch(given, (made,) if isinstance(made, torch.Tensor) else made)
        tensors = {name: value for name, value in launch.arguments.items() if isinstance(value, torch.Tensor)}
        others = {name: value for name, value in launch.arguments.items() if name not in tensors}
        at = kernel_side_table.add_kernel(launch.kernel), kernel_side_table.add_constant_args(others)
        written = get_mutated_tensors(*at, tensors, {})
        assert sorted(written) == sorted(launch.written), (known.operator, written)
print("equal")
"""


def test_torch_finds_what_a_kernel_writes_to():
    """Otherwise it would take all of a launch's tensors for written, and copy them first."""
    assert_equal_with_triton(MUTATIONS)


ANALYSED = """
from contextlib import nullcontext
from unittest.mock import patch
from torch._higher_order_ops import triton_kernel_wrap
from lightning_ups._compat.torch.compile import launches
from lightning_ups.transforms.float8 import compiler_settings, float8_swap
from tests._compat.torch.compile.test_graph_passes import feed
from tests.compiled_for_cuda import scheduled

def graphs():
    parsed = []

    def count(kernel, *rest, plain=triton_kernel_wrap.generate_ttir):
        parsed.append(kernel.fn.__name__)
        return plain(kernel, *rest)

    with patch.object(triton_kernel_wrap, "generate_ttir", count):
        found = scheduled(build, shape, lambda: compiler_settings({recipe!r}, by_kernels=True))
    code = "".join(graph.code for graph in found).splitlines()
    return parsed, [line for line in code if not line.startswith("#")]  # which count compilations and launches

build, shape, _ = feed(float8_swap({recipe!r}))
with patch.object(launches, "_analysed_once", nullcontext):
    often, wanted = graphs()
once, found = graphs()
assert found == wanted
assert set(once) == set(often) and len(once) <= {kinds} and len(often) >= 2 * {launches}, (once, often)
print("equal")
"""


@pytest.mark.parametrize(("recipe", "kinds", "launches"), [("tensorwise", 12, 18), ("rowwise", 16, 24)])
def test_kernels_are_parsed_once_for_each_kind_of_launch_and_graphs_are_the_same(recipe, kinds, launches):
    assert_equal_with_triton(ANALYSED.format(recipe=recipe, kinds=kinds, launches=launches))


@pytest.mark.gpu(capability=(8, 9))
class TestOnAGpu:
    def test_a_graph_that_launches_casts_itself_has_the_same_bits(self):
        x = torch.randn(1000, 2064, device="cuda", dtype=torch.bfloat16)
        wanted = calls(x)
        with compiler_settings("tensorwise"):
            torch.compiler.reset()
            compiled = torch.compile(calls, fullgraph=True)
            found, code = run_and_get_code(compiled, x)
        assert_same(found, wanted)
        assert "lightning_ups" not in "".join(code).split("def call")[-1]

    @pytest.mark.parametrize("bias", [False, True])
    def test_layers_train_as_they_do_one_by_one(self, bias):
        def trained(*, is_compiled):
            torch.manual_seed(1)
            swap = float8_swap("tensorwise")
            layers = (nn.Linear(n, m, bias=bias) for n, m in ((256, 512), (512, 256)))
            net = nn.Sequential(*(swap(layer.cuda().bfloat16()) for layer in layers))
            x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            out = (torch.compile(net, fullgraph=True) if is_compiled else net)(x)
            out.float().square().sum().backward()
            return [out.detach(), x.grad, *(p.grad for p in net.parameters())]

        torch.compiler.reset()
        with compiler_settings("tensorwise"):
            wanted, found = trained(is_compiled=False), trained(is_compiled=True)
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one, other)


def run_and_get_code(function, *args):
    from torch._inductor.utils import run_and_get_code as run  # noqa: TID251  (which imports Triton's templates)

    return run(function, *args)
