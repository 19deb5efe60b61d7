import pytest
import torch

from lightning_ups.kernels.attention.mask import dense_mask


def test_no_mask_where_all_is_seen():
    assert dense_mask(4, 4, causal=False, window=None, ids_BS=None, device=torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("causal", "window", "ids", "wanted"),
    [
        (True, None, None, ["x...", "xx..", "xxx.", "xxxx"]),
        (True, 2, None, ["x...", "xx..", ".xx.", "..xx"]),
        (False, 2, None, ["xx..", "xxx.", ".xxx", "..xx"]),
        (False, None, [0, 0, 1, 1], ["xx..", "xx..", "..xx", "..xx"]),
        (True, 2, [0, 1, 1, 1], ["x...", ".x..", ".xx.", "..xx"]),
    ],
)
def test_what_is_seen(causal, window, ids, wanted):
    rows = None if ids is None else torch.tensor([ids])
    mask = dense_mask(4, 4, causal=causal, window=window, ids_BS=rows, device=torch.device("cpu"))
    assert ["".join("x" if seen else "." for seen in row) for row in mask[0, 0].tolist()] == wanted
