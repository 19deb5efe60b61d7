"""Float8 layers with a scale for each row that cast by kernels of ours: torchao's numbers, fewer operators."""

from contextlib import nullcontext

import pytest
import torch
from torch._dynamo import config  # noqa: TID251  (a user's setting, by the name that torch documents)

from lightning_ups.transforms.float8 import compiler_settings
from lightning_ups.transforms.float8 import row_product as float8_row_product
from lightning_ups.transforms.recompute.wrapping import recompute
from tests.transforms.float8.test_product import (
    OURS,
    assert_equal,
    by_torchao,
    converted,
    graphs_of,
    sharded_alike,
    trained,
    trained_on_gpu,
)

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
RECIPES = ["rowwise", "rowwise_with_gw_hp"]
every_recipe = pytest.mark.parametrize("recipe", RECIPES)


def cpus_scale_rows():
    """Return whether torch has a product scaled by rows on CPUs, which torchao asks for."""
    one = torch.ones(16, 16).to(torch.float8_e4m3fn)
    try:
        torch._scaled_mm(one, one.t(), scale_a=torch.ones(16, 1), scale_b=torch.ones(1, 16), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


beside_torchao = pytest.mark.skipif(not cpus_scale_rows(), reason="torch 2.11 scales no rows on CPUs, as torchao asks")


@beside_torchao
@every_recipe
@pytest.mark.parametrize("rows", [(4, 32), (5, 7), (1,)])  # 35 and 1 are no multiples of 16, over which gradients sum
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_and_gradients_are_torchaos_bit_for_bit(dtype, rows, recipe):
    with by_torchao():
        wanted = trained(converted(dtype, recipe=recipe), rows=rows, dtype=dtype)
    assert_equal(trained(converted(dtype, recipe=recipe), rows=rows, dtype=dtype), wanted)
    torch.compiler.reset()
    compiled = torch.compile(converted(dtype, recipe=recipe), backend="aot_eager", fullgraph=True)
    assert_equal(trained(compiled, rows=rows, dtype=dtype), wanted)


@beside_torchao
@every_recipe
@pytest.mark.parametrize("frozen", [("gate.weight",), ("gate.weight", "up.weight"), ("down.weight", "down.bias")])
@pytest.mark.parametrize("wants_input", [True, False])
def test_frozen_weights_and_inputs_without_gradients(frozen, wants_input, recipe):
    with by_torchao():
        wanted = trained(converted(frozen=frozen, recipe=recipe), wants_input=wants_input)
    assert_equal(trained(converted(frozen=frozen, recipe=recipe), wants_input=wants_input), wanted)


@beside_torchao
@every_recipe
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


@every_recipe
def test_no_rows_and_inference_go_as_before(recipe):
    net = converted(recipe=recipe)
    assert net(torch.empty(0, 64, dtype=torch.bfloat16)).shape == (0, 64)
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    with torch.inference_mode():
        found = net(x)
    with torch.no_grad():
        assert torch.equal(net(x), found)


@every_recipe
def test_a_second_derivative_is_refused(recipe):
    net, x = converted(recipe=recipe), torch.randn(16, 64, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(net(x).float().square().sum(), x, create_graph=True)


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
def test_what_is_recomputed_casts_no_weight_in_the_order_of_forward(monkeypatch):
    monkeypatch.setattr(float8_row_product, "_kernel_scales", lambda _: True)  # as on a GPU
    net = converted(recipe="rowwise")
    with recompute([net], save="matmuls"):
        _, backward = graphs_of(net)
    assert backward[OURS.float8_scaled_rows.default] == 3  # gradients


@every_recipe
@pytest.mark.parametrize("chosen", [torch.arange(32) % 3, torch.zeros(32)], ids=["some", "none"])
@config.patch(capture_dynamic_output_shape_ops=True)
def test_a_graph_may_choose_the_rows(chosen, recipe):
    """How many there are is then not known while it is compiled, and may not be asked."""
    net = converted(recipe=recipe).gate

    def run(backend):
        def forward(x):
            return net(x[chosen.nonzero().squeeze(1)])

        torch.manual_seed(1)
        x = torch.randn(32, 64).bfloat16().requires_grad_()
        torch.compiler.reset()
        y = (forward if backend is None else torch.compile(forward, backend=backend, fullgraph=True))(x)
        net.weight.grad = None
        y.float().square().sum().backward()
        return [y.detach(), x.grad, net.weight.grad]

    assert_equal(run("aot_eager"), run(None))


@beside_torchao
@every_recipe
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_weights_that_are_gathered(ranks, backend, recipe):
    assert ranks(sharded_alike, backend, recipe) == [True] * 5


@pytest.mark.gpu(capability=(8, 9))
@every_recipe
@pytest.mark.parametrize("compiles", [False, True])
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
