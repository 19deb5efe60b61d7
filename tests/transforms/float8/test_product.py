"""Float8 layers that cast by kernels of ours, by each recipe: torchao's numbers, fewer operators, fewer bytes kept."""

from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo import config  # noqa: TID251  (a user's setting, by the name that torch documents)
from torch._dynamo.backends.common import aot_autograd  # noqa: TID251  (the documented way to look at graphs)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F  # noqa: N812

from lightning_ups.transforms.float8 import compiler_settings
from lightning_ups.transforms.float8 import layers as float8_layers
from lightning_ups.transforms.float8 import product as float8_product
from lightning_ups.transforms.float8.convert import convert_to_float8
from lightning_ups.transforms.recompute.wrapping import recompute

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
OURS = torch.ops.lightning_ups
ROWWISE = ("rowwise", "rowwise_with_gw_hp")


def cpus_scale_rows():
    """Return whether torch has a product scaled by rows on CPUs, which torchao asks for."""
    one = torch.ones(16, 16).to(torch.float8_e4m3fn)
    try:
        torch._scaled_mm(one, one.t(), scale_a=torch.ones(16, 1), scale_b=torch.ones(1, 16), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


beside_torchao = pytest.mark.skipif(not cpus_scale_rows(), reason="torch 2.11 scales no rows on CPUs, as torchao asks")
every_recipe = pytest.mark.parametrize("recipe", ["tensorwise", *ROWWISE])
as_torchao_has_it = pytest.mark.parametrize(
    "recipe", ["tensorwise", *(pytest.param(name, marks=beside_torchao) for name in ROWWISE)]
)


class SwiGLU(nn.Module):
    def __init__(self, *, bias=True):
        super().__init__()
        self.gate, self.up = nn.Linear(64, 128, bias=False), nn.Linear(64, 128, bias=False)
        self.down = nn.Linear(128, 64, bias=bias)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


def converted(dtype=torch.bfloat16, *, frozen=(), recipe="tensorwise", number_format="e4m3"):
    torch.manual_seed(0)
    net = SwiGLU().to(dtype)
    for name in frozen:
        net.get_parameter(name).requires_grad = False
    convert_to_float8(net, recipe=recipe, number_format=number_format, include=["*"])
    return net


def trained(net, *, rows=(4, 32), dtype=torch.bfloat16, wants_input=True):
    torch.manual_seed(1)
    x = torch.randn(*rows, 64).to(dtype).requires_grad_(wants_input)
    y = net(x)
    (y.float() * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in net.parameters())]


@contextmanager
def by_torchao():
    """Let layers compute as torchao wrote them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(float8_layers, "_with_kernels", lambda *_, **__: None)
        yield


def assert_equal(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


@as_torchao_has_it
@pytest.mark.parametrize("rows", [(4, 32), (5, 7), (1,)])  # 35 and 1 are no multiples of 16, over which gradients sum
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_and_gradients_are_torchaos_bit_for_bit(dtype, rows, recipe):
    with by_torchao():
        wanted = trained(converted(dtype, recipe=recipe), rows=rows, dtype=dtype)
    assert_equal(trained(converted(dtype, recipe=recipe), rows=rows, dtype=dtype), wanted)
    torch.compiler.reset()
    compiled = torch.compile(converted(dtype, recipe=recipe), backend="aot_eager", fullgraph=True)
    assert_equal(trained(compiled, rows=rows, dtype=dtype), wanted)


@pytest.mark.parametrize("by_kernels", [True, False])
def test_hybrid_is_what_torchao_makes_of_a_model_itself(by_kernels):
    torchao = pytest.importorskip("torchao.float8")
    torch.manual_seed(0)
    theirs = SwiGLU().to(torch.bfloat16)
    config = replace(torchao.Float8LinearConfig.from_recipe_name("tensorwise"), pad_inner_dim=True)
    torchao.convert_to_float8_training(theirs, config=config)
    with nullcontext() if by_kernels else by_torchao():
        assert_equal(trained(converted(number_format="hybrid")), trained(theirs))


@pytest.mark.parametrize("by_kernels", [True, False])
@pytest.mark.parametrize("spread", [0, 2])  # of the sizes of rows, in powers of ten on either side
def test_gradients_in_e4m3_are_nearer(by_kernels, spread):
    def gradients(net):
        torch.manual_seed(1)
        x = torch.randn(512, 64, requires_grad=True)
        out = net(x)
        torch.manual_seed(2)
        out.backward(torch.randn(out.shape) * torch.logspace(-spread, spread, 512)[:, None])
        return x.grad, net.weight.grad

    def error(number_format):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 128, bias=False))
        exact = gradients(net[0])
        net.zero_grad()
        convert_to_float8(net, recipe="tensorwise", number_format=number_format, include=["*"])
        with nullcontext() if by_kernels else by_torchao():
            found = gradients(net[0])
        return [((one - other).norm() / other.norm()).item() for one, other in zip(found, exact, strict=True)]

    # What e4m3 leaves is mostly of the other factor, a weight or a value, that is in e4m3 either way.
    for fine, coarse in zip(error("e4m3"), error("hybrid"), strict=True):
        assert fine < 0.04
        assert 1.4 < coarse / fine < 1.8


@as_torchao_has_it
@pytest.mark.parametrize("frozen", [("gate.weight",), ("gate.weight", "up.weight"), ("down.weight", "down.bias")])
@pytest.mark.parametrize("wants_input", [True, False])
def test_frozen_weights_and_inputs_without_gradients(frozen, wants_input, recipe):
    with by_torchao():
        wanted = trained(converted(frozen=frozen, recipe=recipe), wants_input=wants_input)
    assert_equal(trained(converted(frozen=frozen, recipe=recipe), wants_input=wants_input), wanted)


@as_torchao_has_it
def test_a_transposed_input_and_a_transposed_gradient(recipe):
    def run():
        net = converted(recipe=recipe).gate
        x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
        y = net(x.t())
        (y.t() @ torch.linspace(-1, 1, 32).bfloat16()).float().square().sum().backward()
        return [y.detach(), x.grad, net.weight.grad]

    with by_torchao():
        wanted = run()
    assert_equal(run(), wanted)


def test_an_input_has_the_type_of_the_autocast_of_its_device_and_weights_stay_float32():
    with torch.autocast("cpu", dtype=torch.bfloat16):  # which rounds within torch's product, too: no bits of torchao's
        wanted, found = (
            trained(converted(torch.float32), dtype=dtype, wants_input=False)
            for dtype in (torch.bfloat16, torch.float32)
        )
    assert found[0].dtype == torch.bfloat16
    assert found[2].dtype == torch.float32
    assert_equal(found, wanted)


@every_recipe
def test_no_rows_and_inference_go_as_before(recipe):
    net = converted(recipe=recipe)
    assert net(torch.empty(0, 64, dtype=torch.bfloat16)).shape == (0, 64)
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    with torch.inference_mode():
        found = net(x)
    with torch.no_grad():
        assert torch.equal(net(x), found)


def test_half_of_the_bytes_of_an_input_are_kept_for_backward():
    kept = {}
    for by_kernels in (False, True):
        net, sizes = converted(), Counter()

        def pack(tensor, net=net, sizes=sizes):
            if tensor.untyped_storage().data_ptr() != net.gate.weight.data_ptr():
                sizes[tensor.dtype] += tensor.numel() * tensor.element_size()
            return tensor

        x = torch.randn(256, 64, dtype=torch.bfloat16, requires_grad=True)
        how = nullcontext() if by_kernels else by_torchao()
        with how, torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            net.gate(x)
        kept[by_kernels] = sizes
    assert kept[False][torch.bfloat16] == 256 * 64 * 2
    assert kept[True][torch.float8_e4m3fn] == 256 * 64
    assert kept[True][torch.bfloat16] == 0


def graphs_of(net):
    """Return how many there are of each operator in each graph, in the order in which they first come."""
    kept = []

    def keep(graph, _):
        kept.append(Counter(node.target for node in graph.graph.nodes if node.op == "call_function"))
        return make_boxed_func(graph.forward)

    torch.compiler.reset()
    compilers = {"fw_compiler": keep, "bw_compiler": keep, "partition_fn": min_cut_rematerialization_partition}
    trained(torch.compile(net, backend=aot_autograd(**compilers), fullgraph=True))  # in parts as inductor has them
    return kept


def test_a_graph_has_fewer_than_half_of_the_operators_and_casts_a_shared_input_once():
    with by_torchao():
        theirs = sum(graph.total() for graph in graphs_of(converted()))
    forward, backward = graphs_of(converted())
    assert forward.total() + backward.total() < theirs / 2
    assert forward[OURS.float8_both.default] == 2  # of gate and up together, and of down
    assert forward[OURS.float8_rows.default] == 3  # weights
    assert backward[OURS.float8_both.default] == 3
    assert backward[OURS.float8_columns.default] == 3


def test_the_gradient_of_a_bias_is_found_where_casts_want_its_gradient_to_be_in_memory():
    _, backward = graphs_of(converted())
    order = [*backward]
    assert order.index(OURS.float8_both.default) < order.index(torch.ops.aten.sum.dim_IntList)


@every_recipe
@pytest.mark.parametrize("wants_input", [False, True])
@config.patch(capture_dynamic_output_shape_ops=True)
def test_a_graph_may_choose_the_rows(wants_input, recipe):
    """How many there are is then not known while it is compiled, and may not be asked."""
    net = converted(recipe=recipe).gate

    def run(backend, *, among=3):
        chosen = torch.arange(32) % among

        def forward(x):
            return net(x[chosen.nonzero().squeeze(1)])

        torch.manual_seed(1)
        x = torch.randn(32, 64).bfloat16().requires_grad_(wants_input)
        torch.compiler.reset()
        y = (forward if backend is None else torch.compile(forward, backend=backend, fullgraph=True))(x)
        net.weight.grad = None
        y.float().square().sum().backward()
        return [y.detach(), x.grad, net.weight.grad]

    assert_equal(run("aot_eager"), run(None))
    assert_equal(run("aot_eager", among=1), run(None, among=1))  # none of them


def test_what_is_recomputed_casts_no_weight_in_the_order_of_forward():
    net = converted()
    with recompute([net], save="matmuls"):
        _, backward = graphs_of(net)
    assert backward[OURS.float8_rows.default] == 0
    assert backward[OURS.float8_columns.default] == 3


def sharded(by_kernels, backend, recipe):
    """Return the output, and the gradients whole, of a net that two ranks have in parts."""
    net = converted(recipe=recipe)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (*net.children(), net):
        fully_shard(part, mesh=mesh)
    with nullcontext() if by_kernels else by_torchao():
        if backend is not None:
            torch.compiler.reset()
            net.compile(backend=backend)
        output, _, *gradients = trained(net, wants_input=False)
    return [output, *(gradient.full_tensor() for gradient in gradients)]


def sharded_alike(backend, recipe):
    found, wanted = sharded(True, backend, recipe), sharded(False, None, recipe)
    return [torch.equal(one, other) for one, other in zip(found, wanted, strict=True)]


@as_torchao_has_it
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_weights_that_are_gathered(ranks, backend, recipe):
    assert ranks(sharded_alike, backend, recipe) == [True] * 5


def with_a_cast_weight(backend=None):
    """Return the output and the gradients of a layer whose weight is as a gather in float8 leaves it."""
    scaling = pytest.importorskip("torchao.float8.float8_scaling_utils")
    training = pytest.importorskip("torchao.float8.float8_training_tensor")
    layer, weight = converted().gate, torch.linspace(-1, 1, 128 * 64).view(128, 64).bfloat16().requires_grad_()
    cast = scaling.hp_tensor_to_float8_dynamic(
        weight, torch.float8_e4m3fn, layer.linear_mm_config, gemm_input_role=training.GemmInputRole.WEIGHT
    )
    layer._parameters["weight"] = cast
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    torch.compiler.reset()
    output = layer(x) if backend is None else torch.compile(layer, backend=backend, fullgraph=True)(x)
    output.float().square().sum().backward()
    return [output.detach(), x.grad, weight.grad]


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_a_weight_that_was_gathered_in_float8(backend):
    with by_torchao():
        wanted = with_a_cast_weight()
    assert_equal(with_a_cast_weight(backend), wanted)


def trained_on_gpu(net, rows):
    torch.manual_seed(1)
    x = torch.randn(*rows, 64).bfloat16().cuda().requires_grad_()
    y = net.cuda()(x)
    (y.float() * torch.linspace(-1, 1, y.numel(), device="cuda").view_as(y)).sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in net.parameters())]


@pytest.mark.gpu(capability=(8, 9))
@pytest.mark.parametrize(("recipe", "compiles"), [("tensorwise", False), *product(ROWWISE, (False, True))])
@pytest.mark.parametrize("rows", [(4, 32), (5, 7)])
def test_values_and_gradients_on_a_gpu_are_torchaos_bit_for_bit(rows, compiles, recipe):
    with by_torchao():
        wanted = trained_on_gpu(converted(recipe=recipe), rows)
    net = converted(recipe=recipe)
    torch.compiler.reset()
    if compiles:
        net.gate.compile(fullgraph=True)
        net.down.compile(fullgraph=True)
    with compiler_settings(recipe) if compiles else nullcontext():
        assert_equal(trained_on_gpu(net, rows), wanted)


# Columns: of weights, and of gradients and inputs.
@pytest.mark.parametrize(("recipe", "columns", "maxima"), [("rowwise", 3 + 5, 3 + 5), ("rowwise_with_gw_hp", 3, 0)])
def test_a_graph_casts_a_shared_input_once_in_each_order(recipe, columns, maxima):
    forward, backward = graphs_of(converted(recipe=recipe))
    assert forward[OURS.float8_scaled_rows.default] == 3 + 2  # weights, what gate and up share, what down is given
    assert backward[OURS.float8_scaled_rows.default] == 3
    both = forward + backward  # the smaller of an input and its cast is kept
    assert both[OURS.float8_scaled_columns.default] == columns
    assert both[OURS.float8_column_maxima.default] == maxima


@beside_torchao
def test_what_is_recomputed_casts_no_weight_in_the_order_of_forward_by_rows(monkeypatch):
    monkeypatch.setattr(float8_product, "_kernel_scales", lambda _: True)  # as on a GPU
    net = converted(recipe="rowwise")
    with recompute([net], save="matmuls"):
        _, backward = graphs_of(net)
    assert backward[OURS.float8_scaled_rows.default] == 3  # gradients
