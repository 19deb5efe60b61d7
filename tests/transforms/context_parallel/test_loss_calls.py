import pytest
import torch
import torch.distributed as dist

from lightning_ups.kernels.linear_cross_entropy import linear_cross_entropy
from lightning_ups.transforms.context_parallel.loss_calls import loss_by_rows
from tests.strategies.cases import two_ranks


@two_ranks
@pytest.mark.parametrize("options", [{}, {"ignore_index": 3, "z_loss": 0.1}, {"reduction": "sum"}], ids=repr)
def test_rows_are_divided_and_the_loss_is_that_of_all(options):
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 6, 8, requires_grad=True), torch.randn(5, 8, requires_grad=True)
    targets, seen = torch.tensor([[0, 1, 2, 3, 3, 3], [-100, 2, 4, 4, 1, 0]]).clamp(-100 if not options else 0), []
    right = linear_cross_entropy(hidden, weight, targets, **options)
    right.backward()
    expected = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None

    def function(hidden, *args, **options):
        seen.append(hidden.shape[1])
        return linear_cross_entropy(hidden, *args, **options)

    own = loss_by_rows(function, dist.group.WORLD, lambda seq: seq == 6)
    loss = own(hidden, weight, targets, **options)
    loss.backward()
    torch.testing.assert_close(loss, right)
    for tensor, gradient in zip((hidden, weight), expected, strict=True):
        dist.all_reduce(tensor.grad)
        torch.testing.assert_close(tensor.grad / 2, gradient)
    assert seen == [6 if options.get("reduction") == "sum" else 3]
