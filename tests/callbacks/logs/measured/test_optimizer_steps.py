"""Its use is in tests/callbacks/logs/test_token_throughput.py."""

import torch

from lightning_ups.callbacks.logs.measured.optimizer_steps import OptimizerSteps


def optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)


def test_a_step_is_heard_until_it_is_forgotten():
    heard, (one, two) = OptimizerSteps(), (optimizer(), optimizer())
    assert not heard.any
    heard.listen([one, two, object()])
    assert not heard.any
    two.step()
    assert heard.any
    heard.forget()
    assert not heard.any


def test_optimizers_are_left_as_they_were():
    heard, one = OptimizerSteps(), optimizer()
    heard.listen([one])
    heard.close()
    one.step()
    assert not heard.any
    assert not one._optimizer_step_post_hooks


def test_where_none_is_known_all_is_a_step():
    heard = OptimizerSteps()
    heard.listen([])
    assert (heard.any, heard.every_batch) == (False, True)
    heard.close()
    assert not heard.every_batch
