import pytest
import torch

from lightning_ups.kernels import weight_gradient as module
from lightning_ups.kernels.weight_gradient import WeightGradient

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def summed(vocab, dim, *, dtype=torch.bfloat16, lean=False, once=False, chunks=3):
    generator = torch.Generator().manual_seed(vocab)
    gradients = torch.randn(chunks, 7, vocab, generator=generator)
    hidden = torch.randn(chunks, 7, dim, generator=generator)
    precise = torch.promote_types(dtype, torch.float32)
    total = WeightGradient(torch.empty(vocab, dim, dtype=dtype), precise, lean=lean, once=once)
    for g, h in zip(gradients.to(precise), hidden.to(precise), strict=True):
        total.add(g, h)
    return total.take(), torch.einsum("cnv,cnd->vd", gradients.double(), hidden.double())


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 9, 1000, 5001])
def test_the_sum_is_rounded_once(vocab, dtype, lean):
    found, wanted = summed(vocab, 3, dtype=dtype, lean=lean)
    assert found.dtype == dtype
    assert found.is_contiguous()
    wide = summed(vocab, 3, dtype=torch.float64 if dtype == torch.float64 else torch.float32)[0]
    assert torch.equal(found, wide.to(dtype))
    torch.testing.assert_close(wide.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 64, 1000])
@pytest.mark.parametrize("first", [1, 5, 1024])
def test_halves_are_made_narrow_where_they_lie(monkeypatch, rows, first):
    monkeypatch.setattr(module, "_ROWS_AT_FIRST", first)
    result = torch.empty(2 * rows, 3, dtype=torch.bfloat16)
    wide = result.view(-1).view(torch.float32).view(rows, 3)
    values = torch.randn(rows, 3)
    wide.copy_(values)
    module._narrow(wide, result)
    assert torch.equal(result[:rows], values.bfloat16())


def test_lean_takes_no_memory_besides_the_sum():
    total = WeightGradient(torch.empty(4096, 64, dtype=torch.bfloat16), torch.float32, lean=True)
    total.add(torch.randn(5, 4096), torch.randn(5, 64))
    memory = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in total._parts}
    result = total.take()
    assert sum(memory.values()) == 4096 * 64 * 4
    assert result.untyped_storage().data_ptr() in memory
    assert result.untyped_storage().nbytes() == 4096 * 64 * 2, "and later only its own"


def test_one_chunk_is_written_as_it_is():
    total = WeightGradient(torch.empty(50, 4, dtype=torch.bfloat16), torch.float32, once=True)
    gradient, hidden = torch.randn(5, 50), torch.randn(5, 4)
    total.add(gradient, hidden)
    assert total._parts[0].dtype == torch.bfloat16
    assert torch.equal(total.take(), (gradient.T @ hidden).bfloat16())


@pytest.mark.parametrize("lean", [False, True])
def test_no_chunk_is_no_gradient(lean):
    assert not WeightGradient(torch.empty(50, 4, dtype=torch.bfloat16), torch.float32, lean=lean).take().any()
