import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_ups.transforms.fsdp.accumulate import Accumulation, choose_sync, free_memory, unsharded_gradient_bytes

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
    choice = choose_sync(sync, gradient_bytes=gradients, free_bytes=free)
    assert (choice.sync, choice.gradient_bytes) == (chosen, gradients)
    assert choice.reason


@pytest.mark.parametrize(("sync", "chosen"), [("auto", "every"), ("last", "last")])
def test_gradients_that_a_hook_looks_at_are_reduced_for_it_unless_asked_otherwise(sync, chosen):
    choice = choose_sync(sync, gradient_bytes=1, free_bytes=None, looked_at_by=["Net.on_after_backward"])
    assert choice.sync == chosen
    assert ("Net.on_after_backward" in choice.reason) is (sync == "auto")


def test_an_unknown_choice_is_refused():
    with pytest.raises(ValueError, match=r"Use one of .*'auto'"):
        choose_sync("sometimes", gradient_bytes=0, free_bytes=None)


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
    x, choice = torch.ones(2, 4), choose_sync(sync, gradient_bytes=0, free_bytes=None)
    accumulation = Accumulation(choice=choice, between=["a hook"], see_gradients=[])
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
