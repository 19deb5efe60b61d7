import torch
import torch.distributed as dist

from lightning_ups.transforms.context_parallel.parts import average, gather, split
from tests.strategies.cases import two_ranks


def averaged(gradient):
    dist.all_reduce(gradient)
    return gradient / 2


@two_ranks
def test_gradients_averaged_over_ranks_are_those_of_the_whole():
    torch.manual_seed(0)
    before, within, after = (torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    x, group = torch.randn(3, 6, 4, dtype=torch.float64), dist.group.WORLD
    expected = ((x @ before).tanh() @ within).tanh() @ after
    expected.square().sum().backward()
    right = [p.grad.clone() for p in (before, within, after)]
    before.grad = within.grad = after.grad = None
    found = gather((split((x @ before).tanh(), group) @ within).tanh(), group) @ after
    torch.testing.assert_close(found, expected)
    found.square().sum().backward()
    for p, gradient in zip((before, within, after), right, strict=True):
        torch.testing.assert_close(averaged(p.grad), gradient)


@two_ranks
def test_a_mean_counts_each_value_once():
    values = torch.arange(1.0, 7.0, requires_grad=True)
    part = values[:2] if dist.get_rank() == 0 else values[2:]
    loss = average(part.mean(), torch.tensor(len(part)), dist.group.WORLD)
    loss.backward()
    assert loss.item() == 3.5
    torch.testing.assert_close(averaged(values.grad), torch.full((6,), 1 / 6))


@two_ranks
def test_a_part_without_values_does_not_count():
    x = torch.tensor(2.0, requires_grad=True)
    count = dist.get_rank()
    loss = average(x * 1 if count else x * float("nan"), torch.tensor(count), dist.group.WORLD)
    loss.backward()
    assert loss.item() == 2
    assert count == 0 or x.grad.item() == 2
