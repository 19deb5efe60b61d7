import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ExponentialLR

from lightning_ups._compat.torch.optimizers import count_step, flag_to_skip, has_own_step


def make():
    return SGD([nn.Parameter(torch.ones(1))], lr=0.1)


def test_a_schedulers_step_only_counts(recwarn):
    optimizer = make()
    assert not has_own_step(optimizer)
    scheduler = ExponentialLR(optimizer, 0.9)
    assert not has_own_step(optimizer)
    count_step(optimizer)
    scheduler.step()
    assert not recwarn, "the scheduler takes it for a step"
    optimizer.step = lambda closure=None: None
    assert has_own_step(optimizer)


def test_a_scalers_scale_is_a_step_of_its_own_and_its_flag_is_read():
    optimizer = make()
    assert flag_to_skip(optimizer) is None
    optimizer.grad_scale, optimizer.found_inf = None, torch.ones(())
    assert not has_own_step(optimizer)
    assert flag_to_skip(optimizer) == 1
    optimizer.grad_scale = torch.ones(())
    assert has_own_step(optimizer)
