import pytest
import torch
from torch import nn

from lightning_ups._compat.torch.optimizer_hooks import hooked_once


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
