import copy
import pickle

import pytest
import torch
from torch import nn

from lightning_ups.transforms.float8_autocast import refused_autocast


def test_autocast_around_a_forward_is_refused_as_long_as_it_is_open():
    module = nn.Linear(4, 4)
    with refused_autocast([module], by="Float8Precision", cure="Take it out."):
        module(torch.ones(2, 4))
        with torch.autocast("cpu", enabled=False):
            module(torch.ones(2, 4))
        message = r"Linear was called within torch.autocast, and Float8Precision has set its types.*Take it out\."
        with pytest.raises(RuntimeError, match=message), torch.autocast("cpu", dtype=torch.bfloat16):
            module(torch.ones(2, 4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        module(torch.ones(2, 4))
    assert not module._forward_pre_hooks


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_made_meanwhile_may_be_called_in_autocast_and_keeps_no_hook(clone):
    module = nn.Linear(4, 4)
    with refused_autocast([module], by="Float8Precision", cure="Take it out."):
        twin = clone(module)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            twin(torch.ones(2, 4))
            with pytest.raises(RuntimeError, match="has set its types already"):
                module(torch.ones(2, 4))
    assert not twin._forward_pre_hooks
