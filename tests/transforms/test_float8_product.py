"""Float8 layers that cast by kernels of ours: torchao's numbers, fewer operators, fewer bytes kept."""

from collections import Counter
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd  # noqa: TID251  (the documented way to look at graphs)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F  # noqa: N812

from lightning_ups.transforms.float8 import convert_to_float8
from lightning_ups.transforms.float8_layers import cast_by_kernels
from lightning_ups.transforms.recompute import recompute

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
OURS = torch.ops.lightning_ups


class SwiGLU(nn.Module):
    def __init__(self, *, bias=True):
        super().__init__()
        self.gate, self.up = nn.Linear(64, 128, bias=False), nn.Linear(64, 128, bias=False)
        self.down = nn.Linear(128, 64, bias=bias)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


def converted(dtype=torch.bfloat16, *, frozen=()):
    torch.manual_seed(0)
    net = SwiGLU().to(dtype)
    for name in frozen:
        net.get_parameter(name).requires_grad = False
    convert_to_float8(net, recipe="tensorwise", include=["*"])
    return net


def trained(net, *, rows=(4, 32), dtype=torch.bfloat16, wants_input=True):
    torch.manual_seed(1)
    x = torch.randn(*rows, 64).to(dtype).requires_grad_(wants_input)
    y = net(x)
    (y.float() * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in net.parameters())]


def assert_equal(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


@pytest.mark.parametrize("rows", [(4, 32), (5, 7), (1,)])  # 35 and 1 are no multiples of 16, over which gradients sum
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_and_gradients_are_torchaos_bit_for_bit(dtype, rows):
    wanted = trained(converted(dtype), rows=rows, dtype=dtype)
    with cast_by_kernels():
        assert_equal(trained(converted(dtype), rows=rows, dtype=dtype), wanted)
        torch.compiler.reset()
        compiled = torch.compile(converted(dtype), backend="aot_eager", fullgraph=True)
        assert_equal(trained(compiled, rows=rows, dtype=dtype), wanted)


@pytest.mark.parametrize("frozen", [("gate.weight",), ("gate.weight", "up.weight"), ("down.weight", "down.bias")])
@pytest.mark.parametrize("wants_input", [True, False])
def test_frozen_weights_and_inputs_without_gradients(frozen, wants_input):
    wanted = trained(converted(frozen=frozen), wants_input=wants_input)
    with cast_by_kernels():
        assert_equal(trained(converted(frozen=frozen), wants_input=wants_input), wanted)


def test_a_bfloat16_input_of_float32_weights_under_autocast():
    def run():
        net = converted(torch.float32)
        with torch.autocast("cuda", torch.bfloat16):
            return trained(net, dtype=torch.float32)

    if not torch.cuda.is_available():
        torch.set_autocast_enabled("cuda", True)  # which warns, and is what torchao asks for on every device
        torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        wanted = trained(converted(torch.float32), dtype=torch.float32)
        with cast_by_kernels():
            found = trained(converted(torch.float32), dtype=torch.float32)
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", torch.float16)
    assert found[0].dtype == torch.bfloat16
    assert_equal(found, wanted)


def test_no_rows_and_inference_go_as_before():
    net = converted()
    with cast_by_kernels():
        assert net(torch.empty(0, 64, dtype=torch.bfloat16)).shape == (0, 64)
        x = torch.randn(4, 64, dtype=torch.bfloat16)
        with torch.inference_mode():
            found = net(x)
        with torch.no_grad():
            assert torch.equal(net(x), found)


def test_a_second_derivative_is_refused():
    net, x = converted(), torch.randn(16, 64, dtype=torch.bfloat16, requires_grad=True)
    with cast_by_kernels(), pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(net(x).float().square().sum(), x, create_graph=True)


def test_half_of_the_bytes_of_an_input_are_kept_for_backward():
    kept = {}
    for by_kernels in (False, True):
        net, sizes = converted(), Counter()

        def pack(tensor, net=net, sizes=sizes):
            if tensor.untyped_storage().data_ptr() != net.gate.weight.data_ptr():
                sizes[tensor.dtype] += tensor.numel() * tensor.element_size()
            return tensor

        x = torch.randn(256, 64, dtype=torch.bfloat16, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            if by_kernels:
                with cast_by_kernels():
                    net.gate(x)
            else:
                net.gate(x)
        kept[by_kernels] = sizes
    assert kept[False][torch.bfloat16] == 256 * 64 * 2
    assert kept[True][torch.float8_e4m3fn] == 256 * 64
    assert kept[True][torch.bfloat16] == 0


def graphs_of(net):
    kept = []

    def keep(graph, _):
        kept.append(Counter(node.target for node in graph.graph.nodes if node.op == "call_function"))
        return make_boxed_func(graph.forward)

    torch.compiler.reset()
    compilers = {"fw_compiler": keep, "bw_compiler": keep, "partition_fn": min_cut_rematerialization_partition}
    trained(torch.compile(net, backend=aot_autograd(**compilers), fullgraph=True))  # in parts as inductor has them
    return kept


def test_a_graph_has_fewer_than_half_of_the_operators_and_casts_a_shared_input_once():
    theirs = sum(graph.total() for graph in graphs_of(converted()))
    with cast_by_kernels():
        forward, backward = graphs_of(converted())
    assert forward.total() + backward.total() < theirs / 2
    assert forward[OURS.float8_both.default] == 2  # of gate and up together, and of down
    assert forward[OURS.float8_rows.default] == 3  # weights
    assert backward[OURS.float8_both.default] == 3
    assert backward[OURS.float8_columns.default] == 3


def test_what_is_recomputed_casts_no_weight_in_the_order_of_forward():
    net = converted()
    with cast_by_kernels(), recompute([net], save="matmuls"):
        _, backward = graphs_of(net)
    assert backward[OURS.float8_rows.default] == 0
    assert backward[OURS.float8_columns.default] == 3


def sharded(by_kernels, backend=None):
    """Return the output, and the gradients whole, of a net that two ranks have in parts."""
    net = converted()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (*net.children(), net):
        fully_shard(part, mesh=mesh)
    with cast_by_kernels() if by_kernels else nullcontext():
        if backend is not None:
            torch.compiler.reset()
            net.compile(backend=backend)
        output, _, *gradients = trained(net, wants_input=False)
    return [output, *(gradient.full_tensor() for gradient in gradients)]


def sharded_alike(backend):
    return [torch.equal(one, other) for one, other in zip(sharded(True, backend), sharded(False), strict=True)]


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_weights_that_are_gathered(ranks, backend):
    assert ranks(sharded_alike, backend) == [True] * 5


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
    wanted = with_a_cast_weight()
    with cast_by_kernels():
        assert_equal(with_a_cast_weight(backend), wanted)


@pytest.mark.gpu(capability=(8, 9))
@pytest.mark.parametrize("rows", [(4, 32), (5, 7)])
def test_values_and_gradients_on_a_gpu_are_torchaos_bit_for_bit(rows):
    def on_gpu(net):
        torch.manual_seed(1)
        x = torch.randn(*rows, 64).bfloat16().cuda().requires_grad_()
        y = net.cuda()(x)
        (y.float() * torch.linspace(-1, 1, y.numel(), device="cuda").view_as(y)).sum().backward()
        return [y.detach(), x.grad, *(p.grad for p in net.parameters())]

    wanted = on_gpu(converted())
    with cast_by_kernels():
        assert_equal(on_gpu(converted()), wanted)
