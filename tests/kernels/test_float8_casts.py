"""Casts to float8, as they are specified, against torchao's."""

import pytest
import torch

from lightning_ups.kernels.float8_casts import INNER, TYPES, both_orders, column_order, maxima, row_order

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SHAPES = [(16, 32), (40, 48), (130, 144), (1, 16)]
OPERATORS = {"rows": row_order, "columns": column_order, "both": both_orders}

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


def values(shape, dtype, *, scale=1.0, device="cpu"):
    generator = torch.Generator().manual_seed(sum(shape))
    return (scale * torch.randn(shape, generator=generator)).to(device, dtype)


def assert_same(found, wanted):
    for part, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert one.dtype == other.dtype
        bits = torch.uint8 if one.dtype.itemsize == 1 else torch.int32
        differ = one.contiguous().view(bits) != other.contiguous().view(bits)
        apart = (differ & ~(one.float().isnan() & other.float().isnan())).nonzero()  # its sign is the processor's
        said = [(one[tuple(at)].item(), other[tuple(at)].item()) for at in apart[:5]]
        assert not len(apart), f"output {part}: {len(apart)} of {one.numel()} values, of {one.shape}: {said}"


@pytest.mark.parametrize("form", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("scale", [1.0, 0.0, 1e-4, 1e4])
def test_rows_and_scale_are_torchaos_bit_for_bit(dtype, form, scale):
    scaling = pytest.importorskip("torchao.float8.float8_scaling_utils")
    training = pytest.importorskip("torchao.float8.float8_training_tensor")
    x = values((40, 48), dtype, scale=scale)
    theirs = scaling.hp_tensor_to_float8_dynamic(x, form, training.LinearMMConfig())
    assert_same(row_order(x, maxima(x), form), (theirs._data, theirs._scale.reciprocal()))


@pytest.mark.parametrize("shape", SHAPES)
def test_columns_are_the_rows_transposed_and_filled_up_with_zeros(shape):
    x = values(shape, torch.bfloat16)
    rows, columns, inverse = both_orders(x, maxima(x), E4M3)
    assert_same((rows, inverse), row_order(x, maxima(x), E4M3))
    assert_same((columns, inverse), column_order(x, maxima(x), E4M3))
    assert columns.shape[1] % INNER == 0
    assert torch.equal(columns[:, : shape[0]].float(), rows.t().float())
    assert not columns[:, shape[0] :].float().any()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_is_seen_in_all_of_the_matrix(value):
    x = values((16, 32), torch.bfloat16)
    x[3, 5] = value
    rows, inverse = row_order(x, maxima(x), E4M3)
    assert not (rows.float() * inverse).isfinite().all()
    assert not inverse.isfinite()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(1, 16), (16, 32), (512, 16)])
def test_what_is_no_number_may_be_negative(shape, dtype):  # as 0 times infinity is on many processors
    x = values(shape, dtype)
    x.view(torch.int16 if dtype.itemsize == 2 else torch.int32)[0, 5] = -1
    rows, inverse = row_order(x, maxima(x), E4M3)
    assert inverse.isnan()
    assert rows.float().isnan().all()


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_is_what_its_fake_says(name):
    x = values((40, 48), torch.bfloat16)
    torch.library.opcheck(OPERATORS[name], (x, maxima(x), E5M2), test_utils=("test_schema", "test_faketensor"))
    torch.library.opcheck(maxima, (x,), test_utils=("test_schema", "test_faketensor"))
