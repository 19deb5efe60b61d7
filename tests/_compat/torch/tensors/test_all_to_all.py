import torch
import torch.distributed as dist

from lightning_ups._compat.torch.tensors.all_to_all import all_to_all
from tests.strategies.cases import two_ranks


@two_ranks
def test_each_rank_gets_its_rows_and_sends_their_gradients_back():
    rank, compiled = dist.get_rank(), torch.compile(all_to_all, backend="aot_eager", fullgraph=True)
    for function in (all_to_all, compiled):
        sent = (torch.arange(2.0).view(2, 1) + 10 * rank).requires_grad_()
        received = function(sent, dist.group.WORLD)
        assert received.tolist() == [[rank], [10 + rank]]
        (received * torch.tensor([[1.0], [2.0]]) * (rank + 1)).sum().backward()
        assert sent.grad.tolist() == [[rank + 1], [2 * (rank + 1)]]
