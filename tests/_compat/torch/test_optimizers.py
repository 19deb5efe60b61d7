import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ExponentialLR

from lightning_ups._compat.torch.optimizers import count_step, flag_to_skip, has_own_step, hooked_once


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


def hooked():
    parameter, calls = nn.Parameter(torch.ones(1)), []
    parameter.grad = torch.ones(1)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.register_step_pre_hook(lambda o, *_: calls.append(("before", o)))
    optimizer.register_step_post_hook(lambda o, *_: calls.append(("after", o)))
    return optimizer, calls


def test_hooks_are_called_around_all_steps():
    optimizer, calls = hooked()
    with hooked_once(optimizer):
        assert calls == [("before", optimizer)]
        optimizer.step()
        optimizer.step()
    assert calls == [("before", optimizer), ("after", optimizer)]
    optimizer.step()
    assert len(calls) == 4


def test_they_are_back_after_an_exception():
    optimizer, calls = hooked()
    with pytest.raises(KeyError), hooked_once(optimizer):
        raise KeyError
    optimizer.step()
    assert [name for name, _ in calls] == ["before", "before", "after"]
