"""The kernels: interpreted where there is no GPU, and themselves where there is one, both against the reference."""

import pytest
import torch

from lightning_ups.kernels import float8_casts_triton as kernels
from lightning_ups.kernels.float8_casts import TYPES, both_orders, column_order, maxima, row_order
from tests.interpreted import assert_equal_interpreted
from tests.kernels.test_float8_casts import E4M3, E5M2, SHAPES, assert_same, values


def held(shape, dtype, form, *, power=0):
    """Return values that float8 holds, times a power of two: no cast has anything to round."""
    bits = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(sum(shape)))
    found = bits.view(form).float()
    found = torch.where(found.isfinite(), found, 0.0)
    found.flatten()[-1] = -torch.finfo(form).max
    return (found * 2.0**power).to(dtype)


def kernel_maxima(x):
    found = x.new_empty(kernels.PARTS, dtype=torch.int32)
    kernels.maxima_launch(x, found).run(x.device)
    return found


INTERPRETED = """
import torch
from lightning_ups.kernels import float8_casts as module, float8_casts_triton as kernels
from tests.kernels.test_float8_casts import E4M3, E5M2, assert_same, values
from tests.kernels.test_float8_casts_triton import held, kernel_maxima

kernels.PARTS = module.PARTS = 4
for dtype, form in ((torch.bfloat16, E4M3), (torch.float32, E5M2), (torch.float16, E4M3)):
    for shape, power in (((40, 48), -3), ((130, 144), 0), ((1, 16), 1)):
        x = held(shape, dtype, form, power=power)
        maxima = kernel_maxima(x)
        assert maxima.max() == module._maxima(x).max()
        for rows, columns in ((True, True), (True, False), (False, True)):
            found = module._places(x, form, rows=rows, columns=columns)
            places = [place if wanted else None for place, wanted in zip(found, (rows, columns))]
            for kernels.FAR in (2**31, 0):
                for place in found:
                    place.fill_(3.0)
                tiles = kernels.Tiles(rows=32, columns=64)
                kernels.cast_launch(x, maxima, *places, found[2], tiles=tiles).run(x.device)
                assert_same(found, module._cast(x, maxima, form, rows=rows, columns=columns))
x = values((4, 16), torch.bfloat16)
for value in (float("nan"), float("inf"), -float("inf")):
    x[1, 3] = value
    assert kernel_maxima(x).max() == module._maxima(x).max()
x.zero_()
found = module._places(x, E4M3, rows=True, columns=True)
kernels.cast_launch(x, kernel_maxima(x), *found).run(x.device)
assert_same(found, module._both(x, module._maxima(x), E4M3))
print("equal")
"""


def test_the_interpreted_kernels_do_what_the_reference_does():
    assert_equal_interpreted(INTERPRETED)


@pytest.mark.parametrize(("num_rows", "is_far"), [(2**24 - 16, False), (2**24, True)])
def test_offsets_within_a_tile_of_a_tall_matrix_are_long(monkeypatch, num_rows, is_far):
    monkeypatch.setattr(kernels, "_cast", lambda: None)
    x = torch.empty(num_rows, 128, device="meta", dtype=torch.bfloat16)
    launch = kernels.cast_launch(x, maxima(x), *both_orders(x, maxima(x), E4M3), tiles=kernels.Tiles(columns=128))
    assert launch.arguments["IS_FAR"] == is_far


@pytest.mark.gpu(capability=(8, 9))
@pytest.mark.parametrize("form", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (1000, 2048), (4096, 4112)])
def test_the_kernels_on_a_gpu_do_what_the_reference_does(shape, dtype, form):
    for scale in (1.0, 0.0, 1e-4, 1e4):
        x = values(shape, dtype, scale=scale)
        wanted = both_orders(x, maxima(x), form)
        on_gpu = x.cuda()
        found = [part.cpu() for part in both_orders(on_gpu, maxima(on_gpu), form)]
        assert_same(found, wanted)
        assert_same([part.cpu() for part in row_order(on_gpu, maxima(on_gpu), form)], (wanted[0], wanted[2]))
        assert_same([part.cpu() for part in column_order(on_gpu, maxima(on_gpu), form)], wanted[1:])


@pytest.mark.gpu(capability=(8, 9))
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_is_seen_on_a_gpu(value):
    x = values((1000, 2048), torch.bfloat16, device="cuda")
    x[731, 1200] = value
    rows, inverse = row_order(x, maxima(x), E4M3)
    assert not inverse.isfinite()
    assert not (rows.float() * inverse).isfinite().all()
