"""The kernels: interpreted where there is no GPU, and themselves where there is one, both against the reference."""

import pytest
import torch

from lightning_ups.kernels import float8_row_casts_triton as kernels
from lightning_ups.kernels.float8_casts import TYPES
from lightning_ups.kernels.float8_row_casts import column_maxima, scaled_columns, scaled_rows
from tests.interpreted import assert_equal_interpreted, assert_equal_with_triton
from tests.kernels.test_float8_casts import E4M3, E5M2, SHAPES, assert_same, values
from tests.kernels.test_float8_casts_triton import held
from tests.kernels.test_float8_row_casts import by_columns, uneven


def uneven_held(shape, dtype, form):
    """Return values that float8 holds, times a power of two of their row: no cast by rows has anything to round."""
    powers = torch.arange(shape[0]) % 5 - 3
    return (held(shape, torch.float32, form, power=-5) * 2.0 ** powers[:, None]).to(dtype)


def by_kernels(x, form):
    """Return what kernels make of ``x``, in memory that held other values."""
    rows, inverse = (each.fill_(3.0) for each in scaled_rows(x, form))
    kernels.rows_launch(x, rows, inverse).run(x.device)
    maxima = column_maxima(x).fill_(3)
    kernels.column_maxima_launch(x, maxima).run(x.device)
    return rows, inverse, maxima


INTERPRETED = """
import torch
from lightning_ups.kernels import float8_row_casts as module, float8_row_casts_triton as kernels
from lightning_ups.kernels.float8_casts_triton import Tiles
from tests.kernels.test_float8_casts import E4M3, E5M2, assert_same, values
from tests.kernels.test_float8_row_casts_triton import by_kernels, held, uneven_held

kernels.PARTS = module.PARTS = 4
for kernels.TILE, kernels.WIDEST in ((64, 256), (32, 32)):  # whole rows, one or more, and rows that are read twice
    for dtype, form in ((torch.bfloat16, E4M3), (torch.float32, E5M2), (torch.float16, E4M3)):
        for shape in ((40, 48), (130, 144), (1, 16)):
            x = uneven_held(shape, dtype, form)
            rows, inverse, maxima = by_kernels(x, form)
            assert_same((rows, inverse), module._scaled_rows(x, form))
            assert torch.equal(maxima.amax(0), module._column_maxima(x).amax(0))
for dtype, form in ((torch.bfloat16, E4M3), (torch.float32, E5M2)):
    for shape in ((40, 48), (130, 144), (1, 16)):
        x = held(shape, dtype, form)
        scale = 2.0 ** (torch.arange(shape[1]) % 3 - 2.0)
        x /= scale.to(dtype)
        for kernels.FAR in (2**31, 0):
            found = module._scaled_columns(x, scale, form).fill_(3.0)
            kernels.columns_launch(x, scale, found, tiles=Tiles(rows=32, columns=64)).run(x.device)
            assert_same((found,), (module._scaled_columns(x, scale, form),))
x = values((4, 16), torch.bfloat16)
for value in (float("nan"), -float("nan"), float("inf"), 0.0):
    x[1] = value
    _, inverse, maxima = by_kernels(x, E4M3)  # the interpreter rounds values, and what is not a number, its own way
    _, scales = module._scaled_rows(x, E4M3)
    assert torch.equal(inverse.nan_to_num(7.0), scales.nan_to_num(7.0))
    assert torch.equal(maxima.amax(0), module._column_maxima(x).amax(0))
print("equal")
"""


def test_the_interpreted_kernels_do_what_the_reference_does():
    assert_equal_interpreted(INTERPRETED)


SCHEDULED = """
import re
from tests._compat.torch.compile.test_graph_passes import feed
from lightning_ups.transforms.float8 import compiler_settings, float8_swap
from tests.compiled_for_cuda import scheduled

build, shape, _ = feed(float8_swap({recipe!r}))
graphs = scheduled(build, shape, lambda: compiler_settings({recipe!r}, by_kernels=True))
code = [graph.code.split("def call(")[-1] for graph in graphs]
names = ["rows_kernel", "column_maxima_kernel", "columns_kernel"]
found = [len(re.findall(rf"\\b{{name}}_\\d+\\.run", "".join(code))) for name in names]
assert found == {wanted!r}, found
assert not any("lightning_ups" in each for each in code)
assert not re.search(r"empty_strided_cuda\\(\\((2, 2048|4096), 3072\\).*float32", "".join(code))
print("equal")
"""


@pytest.mark.parametrize(("recipe", "wanted"), [("rowwise", [8, 8, 8]), ("rowwise_with_gw_hp", [8, 0, 3])])
def test_on_a_gpu_a_graph_launches_them_and_writes_no_matrix_in_float32(recipe, wanted):
    """Of three layers, of which two share an input; torchao's casts write SwiGLU's matrices and their gradients so."""
    assert_equal_with_triton(SCHEDULED.format(recipe=recipe, wanted=wanted))


@pytest.mark.gpu(capability=(8, 9))
@pytest.mark.parametrize("form", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (1000, 2048), (4096, 4112), (300, 14336), (300, 18432)])
def test_the_kernels_on_a_gpu_do_what_the_reference_does(shape, dtype, form):
    for scale in (1.0, 0.0, 1e-4):
        x = uneven(shape, dtype, scale=scale)
        on_gpu = x.cuda()
        assert_same([part.cpu() for part in scaled_rows(on_gpu, form)], scaled_rows(x, form))
        assert torch.equal(column_maxima(on_gpu).amax(0).cpu(), column_maxima(x).amax(0))
        assert_same([part.cpu() for part in by_columns(on_gpu, form)], by_columns(x, form))


@pytest.mark.gpu(capability=(8, 9))
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_is_seen_on_a_gpu_in_its_row_and_column(value):
    x = values((1000, 2048), torch.bfloat16, device="cuda")
    x[731, 1200] = value
    for found, at in ((scaled_rows(x, E4M3), 731), (by_columns(x, E4M3), 1200)):
        is_number = (found[0].float() * found[1][:, None]).isfinite().all(1)
        assert is_number.logical_not().nonzero().tolist() == [[at]]


def test_a_float32_matrix_is_turned_around_by_torch():
    x = torch.empty(64, 128, device="meta")
    (launch,) = (each.launch for each in kernels.OPERATORS if each.operator is scaled_columns)
    scale = torch.empty(128, device="meta")
    assert launch((x, scale, E4M3), [scaled_columns(x, scale, E4M3)]) is None
