"""Casts to float8 by scales of rows and of columns, as they are specified, against torchao's."""

import pytest
import torch

from lightning_ups.kernels.float8_casts import INNER, TYPES
from lightning_ups.kernels.float8_row_casts import PARTS, column_maxima, scaled_columns, scaled_rows, scales_of
from tests.kernels.test_float8_casts import E4M3, E5M2, SHAPES, assert_same, values

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


def uneven(shape, dtype, *, scale=1.0):
    """Return values whose rows and columns have largest magnitudes far apart, and some of which are zero."""
    x = values(shape, torch.float32, scale=scale)
    x *= 10 ** torch.linspace(-3, 3, shape[0])[:, None]
    x *= 10 ** torch.linspace(-2, 2, shape[1])
    x[:: shape[0]] = 0
    x[:, 3] = 0
    return x.to(dtype)


def by_columns(x, form):
    scale = scales_of(column_maxima(x).amax(0), x.dtype, form)
    return scaled_columns(x, scale, form), scale.reciprocal()


def by_torchao(x, form, *, dim):
    scaling = pytest.importorskip("torchao.float8.float8_scaling_utils")
    training = pytest.importorskip("torchao.float8.float8_training_tensor")
    config = pytest.importorskip("torchao.float8.config")
    cast = scaling.hp_tensor_to_float8_dynamic(
        x,
        form,
        training.LinearMMConfig(),
        scaling_granularity=config.ScalingGranularity.AXISWISE,
        axiswise_dim=dim,
        round_scales_to_power_of_2=True,
    )
    return cast._data, cast._scale.reciprocal().flatten()


@pytest.mark.parametrize("form", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("scale", [1.0, 0.0, 1e-4, 1e4])
def test_rows_and_columns_are_torchaos_bit_for_bit(dtype, form, scale):
    x = uneven((40, 48), dtype, scale=scale)
    x = x.nan_to_num(posinf=1.0, neginf=1.0)
    assert_same(scaled_rows(x, form), by_torchao(x, form, dim=-1))
    columns, inverse = by_columns(x, form)
    cast, wanted = by_torchao(x, form, dim=0)
    assert_same((columns[:, :40].t(), inverse), (cast, wanted))


@pytest.mark.parametrize("shape", SHAPES)
def test_columns_are_filled_up_with_zeros(shape):
    x = uneven(shape, torch.bfloat16)
    columns, inverse = by_columns(x, E4M3)
    assert columns.shape == (shape[1], -(-shape[0] // INNER) * INNER)
    assert not columns[:, shape[0] :].float().any()
    error = (columns[:, : shape[0]].float() * inverse[:, None] - x.t().float()).abs().amax(1)
    assert (error <= x.float().abs().amax(0) / 16).all()  # three bits behind the first


@pytest.mark.parametrize("value", [float("nan"), -float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", TYPES)
def test_what_is_no_number_is_seen_in_its_row_and_column_alone(dtype, value):
    x = values((16, 32), dtype)
    x[3, 5] = value
    rows, inverse = scaled_rows(x, E4M3)
    is_number = (rows.float() * inverse[:, None]).isfinite().all(1)
    assert is_number.tolist() == [row != 3 for row in range(16)]
    columns, inverse = by_columns(x, E4M3)
    is_number = (columns.float() * inverse[:, None]).isfinite().all(1)
    assert is_number.tolist() == [column != 5 for column in range(32)]


def test_scales_are_powers_of_two_by_which_nothing_leaves_the_range():
    x = uneven((64, 128), torch.bfloat16)
    _, inverse = scaled_rows(x, E4M3)
    assert (inverse.frexp().mantissa == 0.5).all()
    largest = (x.float().abs().amax(1) / inverse)[1:]
    assert (largest <= 448).all()
    assert (largest > 224).all()


def test_operators_are_what_their_fakes_say():
    x = values((40, 48), torch.bfloat16)
    checks = {"test_utils": ("test_schema", "test_faketensor")}
    torch.library.opcheck(scaled_rows, (x, E5M2), **checks)
    torch.library.opcheck(column_maxima, (x,), **checks)
    torch.library.opcheck(scaled_columns, (x, torch.ones(48), E4M3), **checks)
    assert column_maxima(x).shape == (PARTS, 48)
