from types import SimpleNamespace

import torch
from torch import nn

from lightning_ups._compat.torch.fsdp.outputs import find_in_objects


class Slotted:
    __slots__ = ("missing", "tensor")

    def __init__(self, tensor):
        self.tensor = tensor


def gathered_for(output):
    """Return for how many tensors of ``output`` a state gathers that itself sees none."""
    calls = []
    state = SimpleNamespace(_register_pre_backward_hook=lambda output: output, _pre_backward=calls.append)
    find_in_objects(state)
    assert state._register_pre_backward_hook(output) is output
    return calls


def test_tensors_of_objects_announce_their_backward():
    x = torch.ones(2, requires_grad=True)
    twice = 2 * x
    inner = SimpleNamespace(same=twice, other={"deep": [3 * x]}, constant=torch.ones(2), layer=nn.Linear(2, 2))
    inner.itself = inner
    calls = gathered_for([SimpleNamespace(inner=inner, name="graph", form=torch.float32), Slotted(4 * x)])
    (inner.same + inner.other["deep"][0]).sum().backward()
    assert len(calls) == 2


def test_what_fsdp2_sees_itself_is_left_to_it():
    x = torch.ones(2, requires_grad=True)
    for output in (2 * x, [2 * x, None], {"a": (2 * x, 1)}):
        calls = gathered_for(output)
        x.sum().backward()
        assert calls == []


def test_without_gradients_nothing_is_looked_for():
    output = SimpleNamespace(x=torch.ones(2, requires_grad=True))
    with torch.no_grad():
        calls = gathered_for(output)
    output.x.sum().backward()
    assert calls == []
