import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_ups.transforms.fsdp.memory_choices import (
    Accumulation,
    choose_keeping,
    choose_sync,
    free_memory,
    gathered_bytes,
    least_headroom,
    unsharded_gradient_bytes,
)

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


def sharded():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight.requires_grad_(False)
    for module in (*model, model):
        fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    return model


def accumulated(sync):
    model = sharded()
    x = torch.ones(2, 4)
    accumulation = Accumulation(sync=sync, between=["a hook"], see_gradients=[])
    with accumulation.microbatch([model], replicated=False, keeps_all=False):
        model(x).sum().backward()
        within = model[0].weight.grad is not None
    try:
        with accumulation.microbatch([model], replicated=False, keeps_all=False):
            raise RuntimeError
    except RuntimeError:
        pass
    model(x).sum().backward()
    expected = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    expected.load_state_dict({name: p.full_tensor() for name, p in model.state_dict().items()})
    (2 * expected(x).sum()).backward()
    return within, torch.allclose(model[0].weight.grad.full_tensor(), expected[0].weight.grad), bytes_of(model)


def bytes_of(model):
    return unsharded_gradient_bytes(model, reduce_dtype=None), unsharded_gradient_bytes(
        model, reduce_dtype=torch.float64
    )


@pytest.mark.parametrize(("sync", "reduced"), [("last", False), ("every", True)])
def test_the_sum_is_the_same_and_an_exception_ends_it(ranks, sync, reduced):
    within, right, (as_is, double) = ranks(accumulated, sync)
    assert within is reduced
    assert right
    assert (as_is, double) == (96, 192)


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
