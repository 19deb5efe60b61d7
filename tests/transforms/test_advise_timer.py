import pytest
import torch

from lightning_ups.transforms.advise_shapes import Product
from lightning_ups.transforms.advise_table import BFLOAT16
from lightning_ups.transforms.advise_timer import timer_on

PRODUCT = Product(32, 64, 48)


def measure(results, shapes):
    def run(call):
        found = call()
        shapes.append([tuple(g.shape) for g in found] if isinstance(found, tuple) else tuple(found.shape))
        return results[len(shapes) - 1]

    return run


def test_the_parts_add_up_to_forward_and_backward():
    shapes = []
    timer = timer_on(torch.device("cpu"), measure=measure([6.0, 1.5, 3.5], shapes), backend="eager")
    times = timer(PRODUCT, BFLOAT16)
    assert (times.forward_ms, times.dgrad_ms, times.wgrad_ms, times.total_ms) == (1.5, 2.0, 2.5, 6.0)
    assert shapes == [[(32, 64), (48, 64)], (32, 48), [(32, 64)]]  # both gradients, forward, that of the input


def test_noise_makes_no_part_negative():
    timer = timer_on(torch.device("cpu"), measure=measure([6.0, 2.0, 7.0], []), backend="eager")
    times = timer(PRODUCT, BFLOAT16)
    assert (times.forward_ms, times.dgrad_ms, times.wgrad_ms) == (2.0, 4.0, 0.0)


def test_many_shapes_are_each_compiled_and_draw_no_random_number_of_the_run():
    before = torch.get_rng_state()
    timer = timer_on(torch.device("cpu"), measure=lambda call: (call(), 1.0)[1], backend="eager")
    for rows in range(16, 16 * 11, 16):  # more than Dynamo keeps for one function
        timer(Product(rows, 16, 16), BFLOAT16)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.gpu(capability=(8, 9))
@pytest.mark.parametrize("recipe", ["bfloat16", "tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_a_large_product_takes_as_long_as_the_device_needs(recipe):
    product = Product(8192, 4096, 4096)
    times = timer_on(torch.device("cuda", 0))(product, recipe)
    assert 50 < product.flops / times.total_ms / 1e9 < 5000  # TFLOP/s
    assert min(times.forward_ms, times.dgrad_ms, times.wgrad_ms) > 0
