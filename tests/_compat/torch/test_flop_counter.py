import torch
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from lightning_ups._compat.torch.flop_counter import RecomputeCounter, run_backward


def test_what_is_recomputed_is_counted_apart():
    weight = torch.randn(4, 4, requires_grad=True)
    with RecomputeCounter(display=False) as counter:
        loss = checkpoint(lambda x: (x @ weight).relu() @ weight, torch.randn(2, 4), use_reentrant=False).sum()
        loss.backward()
    once = 2 * 2 * 4 * 4
    # Forward twice; gradients of the weight twice, of what lies between once; the second product is not made again.
    assert (counter.get_total_flops(), counter.recomputed) == (once * (2 + 3 + 1), once)


def test_a_plain_backward_recomputes_nothing():
    weight = torch.randn(4, 4, requires_grad=True)
    with RecomputeCounter(display=False) as counter:
        (torch.randn(2, 4) @ weight).sum().backward()
    assert counter.recomputed == 0


def test_modes_stay_on_in_backward():
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.ones(3, requires_grad=True)
    with Mode():
        loss = checkpoint(lambda x: torch.softmax(x, 0).square(), x, use_reentrant=False).sum()
        run_backward(loss)
    assert seen.count(torch.softmax) == 2
    assert x.grad is not None
