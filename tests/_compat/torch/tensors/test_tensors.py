from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_leaves

from lightning_ups._compat.torch.tensors.tensors import (
    add_product,
    arrived,
    forget_meshes,
    local_of,
    plain_memory,
    product,
    whole_of,
)


def test_a_weight_that_is_gathered_in_float8_is_the_memory_that_it_wraps():
    torchao = pytest.importorskip("torchao.float8.fsdp_utils")
    plain = torch.randn(4, 4)
    wrapped = torchao.WeightWithDynamicFloat8CastTensor(plain, None, torch.float8_e4m3fn)
    assert plain_memory(wrapped) is plain
    assert plain_memory(plain) is plain
    assert plain_memory(None) is None


def parts():
    whole = torch.arange(4.0)
    shard = distribute_tensor(whole, init_device_mesh("cpu", (2,)), [Shard(0)])
    same = [of(whole) is whole for of in (local_of, whole_of)]
    return local_of(shard).tolist(), whole_of(shard).tolist(), same, local_of(None)


def test_a_sharded_tensor_is_its_part_or_gathered_and_another_is_itself(ranks):
    assert ranks(parts) == ([0, 1], [0, 1, 2, 3], [True, True], None)


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


def gradient_of_what_waits():
    shard = distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (2,)), [Shard(0)]).requires_grad_()
    waits = shard.redistribute(placements=[Replicate()], async_op=True).to_local()
    other = torch.ones(2)
    (x, (y, same)) = arrived((waits, (waits, other)))
    for held in ([waits], {"x": waits}, Pair(waits, other), ([waits],)):
        (inner, *_) = tree_leaves(arrived(held))
        assert type(inner) is torch.Tensor
        assert inner.requires_grad
    torch.compile(lambda x, y: (x * y).sum(), backend="aot_eager", fullgraph=True)(x, y).backward()
    return type(waits).__name__, type(x).__name__, x.tolist(), shard.grad.full_tensor().tolist(), same is other


def test_what_a_collective_brings_has_its_gradient_in_compiled_code(ranks):
    names = "AsyncCollectiveTensor", "Tensor"
    assert ranks(gradient_of_what_waits) == (*names, [0, 1, 2, 3], [0, 2, 4, 6], True)


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


@pytest.mark.gpu
def test_on_a_gpu():
    a, b = halves("cuda")
    exact = a.double() @ b.double()
    torch.testing.assert_close(product(a, b, dtype=torch.float32).double(), exact, rtol=1e-5, atol=1e-5)
    total = torch.full((8, 16), 2.0, device="cuda")
    add_product(total, a, b)
    torch.testing.assert_close(total.double(), 2 + exact, rtol=1e-5, atol=1e-5)


def told_meshes():
    told = []
    for forget in (False, False, True):
        if forget:
            forget_meshes()
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("told",))
        made = distribute_tensor(torch.randn(4), mesh, [Shard(0)])
        told.append((made.detach().device_mesh is mesh, (made + 1).device_mesh is mesh))
    dist.barrier()
    return told


def test_without_it_a_mesh_is_taken_for_an_equal_one(ranks):
    assert ranks(told_meshes) == [(True, True), (False, False), (True, True)]
