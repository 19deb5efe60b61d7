"""What a module keeps of what was done to it."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

from lightning_ups.transforms.on_module import OnModule

KEPT = OnModule("of_a_test")


class Held:
    def __init__(self, module):
        self.module = module


def test_a_module_keeps_one_value_of_each_name():
    module, other = nn.Linear(2, 2), OnModule("other")
    assert KEPT.get(module) is None
    KEPT.keep(module, "first")
    KEPT.keep(module, "second")
    other.keep(module, "another")
    assert (KEPT.get(module), other.get(module), KEPT.get(nn.Linear(2, 2))) == ("second", "another", None)


def test_what_is_dropped_is_gone_without_a_trace():
    module = nn.Linear(2, 2)
    before = dict(vars(module))
    KEPT.keep(module, "first")
    KEPT.drop(module)
    KEPT.drop(module)
    assert KEPT.get(module) is None
    assert vars(module) == before


def test_a_module_that_its_own_value_holds_is_freed():
    module = nn.Linear(2, 2)
    KEPT.keep(module, Held(module))
    gone = weakref.ref(module)
    del module
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    "twin_of",
    [copy.copy, copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))],
    ids=["copy", "deep", "file"],
)
def test_a_copy_has_nothing_of_it(twin_of):
    module = nn.Linear(2, 2)
    KEPT.keep(module, lambda: "what no file can hold")
    twin = twin_of(module)
    assert KEPT.get(twin) is None
    assert KEPT.get(module)() == "what no file can hold"
    assert torch.equal(twin.weight, module.weight)
    assert KEPT.get(copy.deepcopy(twin)) is None


def test_state_and_attributes_that_users_see_are_as_before():
    module = nn.Linear(2, 2)
    before = [*module.state_dict()], repr(module), [*module.named_modules()], [*module.named_buffers()]
    KEPT.keep(module, nn.Linear(2, 2))
    assert before == ([*module.state_dict()], repr(module), [*module.named_modules()], [*module.named_buffers()])
