import pytest
import torch
from torch import nn

from lightning_ups.transforms.fsdp.keeping import choose_keeping, gathered_bytes, least_headroom

GIB = 2**30


@pytest.mark.parametrize(("headroom", "keep"), [(27, True), (26, False), (0, False)])
def test_it_is_kept_if_it_fits_beside_the_reserve(headroom, keep):
    choice = choose_keeping(gathered=15 * GIB, headroom=headroom * GIB, total=140 * GIB)  # 11.2 are the reserve
    assert choice.keep is keep
    assert f"15.00 GiB gathered {'fit' if keep else 'do not fit'} into the" in choice.reason


def test_where_memory_is_not_known_nothing_is_kept():
    assert least_headroom(torch.device("cpu")) == (None, 0)
    choice = choose_keeping(gathered=1, headroom=None, total=0)
    assert (choice.keep, choice.reason) == (False, "what memory is free is not known here")


def test_what_is_not_sharded_is_not_gathered():
    assert gathered_bytes([nn.Linear(4, 4)]) == 0
