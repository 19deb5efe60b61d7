import pytest
import torch
from torch import nn

from lightning_ups.transforms.sharding.sharded_step import explaining_shards

SAID = "aten.view.default got mixed torch.Tensor and DTensor"


class Failing(torch.optim.Optimizer):
    def __init__(self, error):
        super().__init__([nn.Parameter(torch.ones(1))], {})
        self.error = error

    def step(self, closure=None):
        if closure is not None:
            closure()
        raise self.error


def test_an_optimizer_that_cannot_is_named_with_a_cure():
    optimizer = Failing(RuntimeError(f"{SAID}.\nand more"))
    said = r"Failing cannot step sharded parameters: .*DTensor\. .*AdamW"
    with pytest.raises(RuntimeError, match=said), explaining_shards(optimizer):
        optimizer.step()


class Dispatched(Failing):
    """Fails in a function of another module."""

    def __init__(self, error, module):
        super().__init__(error)
        self.module = {"__name__": module, "error": error}
        exec("def fail():\n    raise error", self.module)

    def step(self, closure=None):
        self.module["fail"]()


def test_what_torch_takes_for_granted_of_shards_without_a_word():
    optimizer = Dispatched(AssertionError(), "torch.distributed.tensor._dispatch")
    said = r"Dispatched cannot step sharded parameters: DTensor has no way to do it\. .*AdamW"
    with pytest.raises(RuntimeError, match=said), explaining_shards(optimizer):
        optimizer.step()


def test_what_an_optimizer_takes_for_granted_itself_stays_as_it_is():
    optimizer = Failing(AssertionError("of its own"))
    with pytest.raises(AssertionError) as seen, explaining_shards(optimizer):
        optimizer.step()
    assert seen.value is optimizer.error


def test_an_error_of_the_closure_is_not_the_optimizers():
    error = RuntimeError(SAID)

    def closure():
        raise error

    optimizer = Failing(RuntimeError("never"))
    with pytest.raises(RuntimeError) as seen, explaining_shards(optimizer):
        optimizer.step(closure)
    assert seen.value is error


def test_other_errors_stay_as_they_are():
    optimizer = Failing(RuntimeError("no memory"))
    with pytest.raises(RuntimeError) as seen, explaining_shards(optimizer):
        optimizer.step()
    assert seen.value is optimizer.error


def test_an_error_outside_a_step_is_not_the_optimizers():
    error = RuntimeError(SAID)
    with pytest.raises(RuntimeError) as seen, explaining_shards(Failing(error)):
        raise error
    assert seen.value is error
