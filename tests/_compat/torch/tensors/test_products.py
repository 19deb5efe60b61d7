import pytest
import torch

from lightning_ups._compat.torch.tensors import products
from lightning_ups._compat.torch.tensors.products import add_product, product


def halves(device="cpu", dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(8, 64, generator=generator), torch.randn(64, 16, generator=generator)
    return a.to(device, dtype), b.to(device, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("place", [True, False])
def test_halves_are_summed_in_float32(dtype, place):
    a, b = halves()
    out = torch.empty(8, 16, dtype=dtype) if place else None
    found = product(a, b, dtype=dtype, out=out)
    assert found.dtype == dtype
    assert out is None or found is out
    torch.testing.assert_close(found, (a.float() @ b.float()).to(dtype), rtol=0, atol=0)


def test_a_small_product_is_not_lost_in_a_large_total():
    total = torch.full((8, 16), 4096.0)
    a, b = halves()
    add_product(total, a, b)
    torch.testing.assert_close(total - 4096, a.float() @ b.float(), rtol=0, atol=2e-3)


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 61])
def test_what_is_added_piece_by_piece_is_added_once(rows):
    generator = torch.Generator().manual_seed(rows)
    a, b = torch.randn(5, rows, generator=generator).bfloat16(), torch.randn(5, 16, generator=generator).bfloat16()
    total = torch.ones(rows, 16)
    add_product(total, a.t(), b)
    torch.testing.assert_close(total, 1 + a.float().t() @ b.float())


def test_one_type_adds_in_place():
    a, b = halves(dtype=torch.float32)
    total = torch.ones(8, 16)
    place = total.data_ptr()
    add_product(total, a, b)
    assert total.data_ptr() == place
    torch.testing.assert_close(total, 1 + a @ b)


@pytest.mark.gpu
@pytest.mark.parametrize("knows", [True, False])
def test_on_a_gpu(monkeypatch, knows):
    if not knows:
        monkeypatch.setattr(products, "_adds_into_float32", lambda _: False)
    a, b = halves("cuda")
    exact = a.double() @ b.double()
    torch.testing.assert_close(product(a, b, dtype=torch.float32).double(), exact, rtol=1e-5, atol=1e-5)
    total = torch.full((8, 16), 2.0, device="cuda")
    add_product(total, a, b)
    torch.testing.assert_close(total.double(), 2 + exact, rtol=1e-5, atol=1e-5)
