import pytest
import torch
from torch._subclasses import FakeTensorMode

from lightning_ups.kernels.attention.mask import dense_mask
from lightning_ups.kernels.attention.request import Request, attended_pairs


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [0, 64, 1000])
def test_pairs_are_those_of_the_mask_but_for_the_diagonal(causal, window):
    mask = dense_mask(512, 512, causal=causal, window=window or None, ids_BS=None, device=torch.device("cpu"))
    seen = 512 * 512 if mask is None else int(mask.sum())
    assert attended_pairs(512, 512, causal=causal, window=window) == pytest.approx(seen, abs=512)


def test_a_triangle_is_half_a_square():
    assert attended_pairs(1000, 1000, causal=True) * 2 == attended_pairs(1000, 1000, causal=False)
    assert attended_pairs(1000, 1000, causal=True, window=1000) == attended_pairs(1000, 1000, causal=True)


def test_documents_are_counted_by_their_lengths():
    boundaries = torch.tensor([0, 100, 1000])
    assert attended_pairs(500, 500, causal=True, cu_seqlens=boundaries, batch=2) == (100**2 + 900**2) // 2


def test_fake_documents_are_counted_as_equally_long():
    with FakeTensorMode():
        boundaries = torch.zeros(11, dtype=torch.int32)
    assert attended_pairs(500, 500, causal=True, cu_seqlens=boundaries, batch=2) == 10 * 100**2 // 2


@pytest.mark.parametrize(
    ("causal", "window", "sides"),
    [(True, 0, (-1, 0)), (False, 0, (-1, -1)), (True, 5, (4, 0)), (False, 5, (4, 4))],
)
def test_window_in_the_packages_words(causal, window, sides):
    assert Request(None, 8, causal, window, 0.0, 1.0).window_sides == sides
