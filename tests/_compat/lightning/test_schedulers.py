import warnings

import torch
from torch import nn
from torch.optim.lr_scheduler import ChainedScheduler, ExponentialLR, ReduceLROnPlateau, SequentialLR, StepLR

from lightning_ups._compat.lightning.schedulers import bind_scheduler


def optimizers():
    layer = nn.Linear(2, 2)
    old = torch.optim.SGD(layer.parameters(), lr=1.0)
    new = torch.optim.SGD(layer.parameters(), lr=1.0)
    new.param_groups = old.param_groups
    return old, new


def test_a_scheduler_drives_the_new_optimizer_and_torch_does_not_warn():
    old, new = optimizers()
    scheduler = ExponentialLR(old, 0.5)
    bind_scheduler(scheduler, {old: new})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        new.step()
        scheduler.step()
    assert scheduler.optimizer is new
    assert new.param_groups[0]["lr"] == 0.5


def test_torch_still_warns_where_the_optimizer_did_not_step():
    old, new = optimizers()
    scheduler = ExponentialLR(old, 0.5)
    bind_scheduler(scheduler, {old: new})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scheduler.step()
    assert "before `optimizer.step()`" in str(caught[0].message)


def test_schedulers_inside_schedulers_are_bound_and_a_plateau_too():
    old, new = optimizers()
    sequential = SequentialLR(old, [ExponentialLR(old, 0.5), StepLR(old, 2)], milestones=[1])
    chained, plateau = ChainedScheduler([ExponentialLR(old, 0.5)], optimizer=old), ReduceLROnPlateau(old)
    for scheduler in (sequential, chained, plateau):
        bind_scheduler(scheduler, {old: new})
    inner = [*sequential._schedulers, *chained._schedulers]
    assert {s.optimizer for s in [sequential, chained, plateau, *inner]} == {new}


def test_a_scheduler_of_another_optimizer_is_left_alone():
    old, new = optimizers()
    other, _ = optimizers()
    scheduler = ExponentialLR(other, 0.5)
    bind_scheduler(scheduler, {old: new})
    assert scheduler.optimizer is other
