import pytest
import torch
import torch.distributed as dist

from lightning_ups.kernels.attention import reference_attention
from lightning_ups.transforms.context_parallel.heads import attend_by_heads
from tests.strategies.cases import two_ranks


def attend(q, k, v):
    return reference_attention(q, k, v, causal=True)


@two_ranks
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1), (6, 3)])
def test_the_parts_are_those_of_the_whole(heads, kv_heads):
    torch.manual_seed(0)
    rank, group = dist.get_rank(), dist.group.WORLD
    whole = [torch.randn(3, 8, n, 5, dtype=torch.float64, requires_grad=True) for n in (heads, kv_heads, kv_heads)]
    parts = [tensor.detach().chunk(2, dim=1)[rank].requires_grad_() for tensor in whole]
    expected, weight = attend(*whole), torch.randn(3, 8, heads, 5, dtype=torch.float64)
    (expected * weight).sum().backward()
    found = attend_by_heads(attend, *parts, group=group)
    (found * weight.chunk(2, dim=1)[rank]).sum().backward()
    torch.testing.assert_close(found, expected.chunk(2, dim=1)[rank], rtol=1e-12, atol=1e-12)
    for part, tensor in zip(parts, whole, strict=True):
        torch.testing.assert_close(part.grad, tensor.grad.chunk(2, dim=1)[rank], rtol=1e-12, atol=1e-12)


@two_ranks
def test_heads_that_do_not_divide_are_refused():
    x = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ValueError, match=r"3 heads .*context_parallel_size=2"):
        attend_by_heads(attend, x, x, x, group=dist.group.WORLD)
