import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_ups.transforms.fsdp.memory_choices import (
    choose_keeping,
    choose_sync,
    free_memory,
    gathered_bytes,
    least_headroom,
    unsharded_gradient_bytes,
)
from tests.strategies.cases import two_ranks

GIB = 2**30


@pytest.mark.parametrize(
    ("sync", "gradients", "free", "chosen"),
    [
        ("auto", GIB, 5 * GIB, "last"),
        ("auto", GIB, 3 * GIB, "every"),
        ("auto", GIB, None, "last"),
        ("last", GIB, 1, "last"),
        ("every", 1, 5 * GIB, "every"),
    ],
)
def test_one_reduction_where_whole_gradients_fit(sync, gradients, free, chosen):
    assert choose_sync(sync, gradient_bytes=gradients, free_bytes=free)[0] == chosen


@pytest.mark.parametrize(("sync", "chosen"), [("auto", "every"), ("last", "last")])
def test_gradients_that_a_hook_looks_at_are_reduced_for_it_unless_asked_otherwise(sync, chosen):
    now, why = choose_sync(sync, gradient_bytes=1, free_bytes=None, looked_at_by=["Net.on_after_backward"])
    assert now == chosen
    assert ("Net.on_after_backward" in why) is (sync == "auto")


def test_the_cpu_does_not_say_what_is_free():
    assert free_memory(torch.device("cpu")) is None


@two_ranks
def test_only_gradients_of_trainable_shards_count_in_the_dtype_of_the_reduction():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight.requires_grad_(False)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    assert [unsharded_gradient_bytes(model, reduce_dtype=dtype) for dtype in (None, torch.float64)] == [96, 192]


@pytest.mark.parametrize(("headroom", "keep"), [(27, True), (26, False), (0, False)])
def test_it_is_kept_if_it_fits_beside_the_reserve(headroom, keep):
    found, why = choose_keeping(gathered=15 * GIB, headroom=headroom * GIB, total=140 * GIB)  # 11.2 are the reserve
    assert found is keep
    assert f"15.00 GiB gathered {'fit' if keep else 'do not fit'} into the" in why


def test_where_memory_is_not_known_nothing_is_kept():
    assert least_headroom(torch.device("cpu")) == (None, 0)
    assert choose_keeping(gathered=1, headroom=None, total=0)[0] is False


def test_what_is_not_sharded_is_not_gathered():
    assert gathered_bytes([nn.Linear(4, 4)]) == 0
