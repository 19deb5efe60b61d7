import copy
import pickle

import pytest
import torch
from torch import nn

from lightning_ups.transforms.casting.autocast_errors import refused_autocast


@pytest.fixture
def module():
    return nn.ModuleDict({"part": nn.Linear(4, 4)})


@pytest.mark.parametrize(("choice", "cure"), [(True, r"out, or set weights='autocast' in"), (False, r"out\.")])
def test_autocast_around_a_forward_is_refused_as_long_as_it_is_open(module, choice, cure):
    part = module["part"]
    with refused_autocast(module, by="Float8Precision", choice=choice):
        part(torch.ones(2, 4))
        with torch.autocast("cpu", enabled=False):
            part(torch.ones(2, 4))
        message = (
            rf"Linear was called within torch.autocast, but Float8Precision has already set.*Take the autocast {cure}"
        )
        with pytest.raises(RuntimeError, match=message), torch.autocast("cpu", dtype=torch.bfloat16):
            part(torch.ones(2, 4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        part(torch.ones(2, 4))
    assert not part._forward_pre_hooks


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_made_meanwhile_may_be_called_in_autocast_and_keeps_no_hook(module, clone):
    with refused_autocast(module, by="Float8Precision", choice=True):
        twin = clone(module)["part"]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            twin(torch.ones(2, 4))
            with pytest.raises(RuntimeError, match="has already set its dtypes"):
                module["part"](torch.ones(2, 4))
    assert not twin._forward_pre_hooks
