import random
import re
from dataclasses import replace

import pytest
import torch

from lightning_ups.insight.advise.linear_shapes import Product
from lightning_ups.insight.advise.te_products import Modules, engine_forward
from lightning_ups.insight.advise.timer import MOST_ROUNDS, ROUNDS, timer_on
from lightning_ups.insight.advise.timing_table import BFLOAT16
from tests import fake_te
from tests.real_te import need_engine

PRODUCT = Product(32, 64, 48)


def _parts(value):
    return value if isinstance(value, tuple) else (value,)


def clock(results, shapes, *, slower=lambda: 1.0):
    """Return a clock of calls that take so long each, on a device that others make slower."""

    def prepare(call):
        number = len(shapes)
        shapes.append(())

        def run():
            shapes[number] = _shapes(call())
            return results[number] * slower()

        return run

    return prepare


def _shapes(found):
    return [tuple(g.shape) for g in found] if isinstance(found, tuple) else tuple(found.shape)


def parts_of(times):
    return times.forward_ms, times.dgrad_ms, times.wgrad_ms


def test_the_parts_add_up_to_forward_and_backward():
    shapes = []
    timer = timer_on(torch.device("cpu"), clock=clock([6.0, 1.5, 3.5], shapes), backend="eager")
    times = timer(PRODUCT, BFLOAT16)
    assert (times.forward_ms, times.dgrad_ms, times.wgrad_ms, times.total_ms) == (1.5, 2.0, 2.5, 6.0)
    assert shapes == [[(32, 64), (48, 64)], (32, 48), [(32, 64)]]  # both gradients, forward, that of the input


FUSED = {
    "a norm and a layer": (Product(32, 64, 48, norm="LayerNorm"), [(64,), (64,), (48, 64)], [(32, 48)]),
    "a norm and three layers": (
        Product(32, 64, 96, norm="RMSNorm", split=(64, 16, 16)),
        [(64,), (64, 64), (16, 64), (16, 64)],
        [(32, 64), (32, 16), (32, 16)],
    ),
    "a gated network": (
        Product(32, 64, 128, norm="RMSNorm", activation="swiglu"),
        [(64,), (128, 64), (128, 64), (64, 128)],
        [(32, 64)],
    ),
    "a network": (
        Product(32, 64, 128, norm="LayerNorm", activation="gelu"),
        [(64,), (64,), (128, 64), (64, 128)],
        [(32, 64)],
    ),
}


@pytest.mark.parametrize(("product", "weights", "results"), FUSED.values(), ids=FUSED)
@pytest.mark.parametrize("recipe", [BFLOAT16, "te-delayed", "te-current", "te-block"])
def test_fused_layers_are_timed_together(product, weights, results, recipe):
    found = []
    with fake_te.installed():
        times = timer_on(torch.device("cpu"), clock=clock([6.0, 1.5, 3.5], found), backend="eager")(product, recipe)
        entered = fake_te.FP8GlobalStateManager.quantization_state.entered
    assert (times.forward_ms, times.dgrad_ms, times.wgrad_ms) == (1.5, 2.0, 2.5)
    results = results if len(results) > 1 else results[0]
    assert found == [[(32, 64), *weights], results, [(32, 64)]]
    assert len(entered) == (recipe != BFLOAT16)  # once: what ends a step is no part of a product


@pytest.mark.parametrize("product", [PRODUCT, *(product for product, _, _ in FUSED.values())], ids=str)
def test_both_compute_the_same(product):
    torch.manual_seed(0)
    modules = Modules(product, device=torch.device("cpu"))
    x = torch.randn(product.rows, product.in_features, dtype=torch.bfloat16)
    with fake_te.installed():
        engine = engine_forward(modules)(x)
    for found, wanted in zip(*(_parts(value) for value in (engine, modules(x))), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.02)


@pytest.mark.parametrize(
    ("measured", "parts"),
    [
        ([6.0, 2.0, 7.0], (2.0, 4.0, 0.0)),
        ([6.0, 4.0, 3.0], (4.0, 0.0, 2.0)),
        ([6.0, 7.0, 3.0], (6.0, 0.0, 0.0)),
        ([6.0, 7.0, 8.0], (6.0, 0.0, 0.0)),
    ],
)
def test_noise_makes_times_doubtful_and_no_part_negative(measured, parts):
    timer = timer_on(torch.device("cpu"), clock=clock(measured, []), backend="eager")
    times = timer(PRODUCT, BFLOAT16)
    assert parts_of(times) == parts
    assert times.total_ms == 6.0
    assert times.doubt


def test_measurements_take_turns_with_weights_that_need_gradients_or_do_not():
    turns, weights = [], []

    def prepare(call):
        number = len(weights)
        weights.append(None)

        def run():
            found = call()
            turns.append((number, len(found) if isinstance(found, tuple) else found.requires_grad))
            return [6.0, 1.5, 3.5][number]

        return run

    timer_on(torch.device("cpu"), clock=prepare, backend="eager")(PRODUCT, BFLOAT16)
    assert turns == [(0, 2), (1, True), (2, 1)] * ROUNDS


def busy(seed, *, share, factor=4.0):
    """Return how many times as long each run takes, where others use the device for a share of the runs."""
    rng = random.Random(seed)
    return lambda: 1 + rng.random() * 0.01 + (rng.random() < share) * rng.random() * factor


@pytest.mark.parametrize("seed", range(20))
def test_other_load_on_the_device_hardly_changes_times(seed):
    device = clock([6.0, 1.5, 3.5], [], slower=busy(seed, share=0.5))
    times = timer_on(torch.device("cpu"), clock=device, backend="eager")(PRODUCT, BFLOAT16)
    assert parts_of(times) == pytest.approx((1.5, 2.0, 2.5), rel=0.1)


def test_varying_times_are_repeated_and_doubtful():
    doubts, rounds = [], []
    for share in (0.0, 0.9):
        runs = []
        slower = busy(1, share=share)
        device = clock([6.0, 1.5, 3.5], [], slower=lambda slower=slower, runs=runs: (runs.append(1), slower())[1])
        doubts.append(timer_on(torch.device("cpu"), clock=device, backend="eager")(PRODUCT, BFLOAT16).doubt)
        rounds.append(len(runs) // 3)
    assert rounds == [ROUNDS, MOST_ROUNDS]
    assert doubts[0] == ""
    assert re.fullmatch(r"runs of the same product differed by \d+%", doubts[1])


def test_many_shapes_are_each_compiled_and_draw_no_random_number_of_the_run():
    before = torch.get_rng_state()
    timer = timer_on(torch.device("cpu"), clock=lambda call: lambda: (call(), 1.0)[1], backend="eager")
    for rows in range(16, 16 * 11, 16):  # more than Dynamo keeps for one function
        timer(Product(rows, 16, 16), BFLOAT16)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.gpu(capability=(8, 9))
@pytest.mark.parametrize("product", [product for product, _, _ in FUSED.values()], ids=FUSED)
@pytest.mark.parametrize("recipe", ["te-delayed", "te-current"])
def test_transformer_engine_is_timed_on_a_gpu(product, recipe):
    need_engine()
    large = replace(
        product,
        rows=4096,
        in_features=2048,
        out_features=product.out_features * 32,
        split=tuple(size * 32 for size in product.split),
    )
    timer = timer_on(torch.device("cuda", 0))
    found = {name: timer(large, name) for name in (BFLOAT16, recipe)}
    for times in found.values():
        assert 0.5 < large.flops / times.total_ms / 1e9 < 5000  # TFLOP/s, of which others may have the most
        assert min(times.forward_ms, times.dgrad_ms) > 0 or times.doubt


@pytest.mark.gpu(capability=(8, 9))
@pytest.mark.parametrize("recipe", ["bfloat16", "tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_a_large_product_takes_as_long_as_the_device_needs(recipe):
    product = Product(8192, 4096, 4096)
    times = timer_on(torch.device("cuda", 0))(product, recipe)
    assert 1 < product.flops / times.total_ms / 1e9 < 5000  # TFLOP/s, of which others may have the most
    assert min(parts_of(times)) > 0 or times.doubt
    assert times.forward_ms > 0
