from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_ups._compat.torch.fsdp.backward import find_in_objects, keep_for_derivatives


class Recorded:
    """A state and its one group, of one parameter, that write down what is called of them."""

    def __init__(self):
        self.calls = []
        self.parameter = torch.ones(2, requires_grad=True)
        held = SimpleNamespace(_unsharded_param=self.parameter)
        self.context = SimpleNamespace(post_backward_final_callback_queued=True, iter_forward_root=self)
        self.state = SimpleNamespace(
            _state_ctx=self.context,
            _pre_backward=lambda gradient: gradient,
            _root_post_backward_final_callback=lambda: self.calls.append("final"),
        )
        self.group = SimpleNamespace(
            fsdp_params=[held, SimpleNamespace()],
            reshard=lambda: self.calls.append("reshard"),
            post_backward=lambda *_: self.calls.append("post_backward"),
        )
        self.stop = keep_for_derivatives([self.state], [self.group])

    def backward(self, *, create_graph, into=None):
        x = torch.ones(2, requires_grad=True)
        y = x * self.parameter
        y.register_hook(self.state._pre_backward)
        torch.autograd.grad(y.sum(), x, create_graph=create_graph)
        if into is not None:
            self.parameter.grad = into
        self.group.post_backward()
        self.group.reshard()
        self.state._root_post_backward_final_callback()


def test_a_backward_that_makes_no_graph_frees_and_reduces():
    recorded = Recorded()
    recorded.backward(create_graph=False)
    assert recorded.calls == ["post_backward", "reshard", "final"]


def test_one_that_makes_a_graph_keeps_what_is_gathered_until_that_of_the_loss_ends():
    recorded = Recorded()
    recorded.backward(create_graph=True)
    recorded.group.reshard()  # after another forward
    assert recorded.calls == []
    assert not recorded.context.post_backward_final_callback_queued
    recorded.backward(create_graph=False)
    assert recorded.calls == ["final"]  # which does the rest
    recorded.group.reshard()
    assert recorded.calls == ["final", "reshard"]


@pytest.mark.parametrize("before", [None, torch.zeros(2)])
def test_one_that_makes_a_graph_and_brings_gradients_is_that_of_the_loss(before):
    recorded = Recorded()
    recorded.parameter.grad = before
    recorded.backward(create_graph=True, into=torch.ones(2))
    assert recorded.calls == ["final"]


def test_gradients_of_an_earlier_microbatch_do_not_count():
    recorded = Recorded()
    recorded.parameter.grad = torch.ones(2)
    recorded.backward(create_graph=True)
    assert recorded.calls == []


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


@pytest.mark.parametrize("is_changed", [True, False])
def test_a_view_announces_its_backward_after_a_change_in_place(is_changed):
    x = torch.ones(2, 3, requires_grad=True)
    view = (2 * x).view(3, 2)
    calls = gathered_for((view, x.view(6)))  # a leaf keeps its hooks, and gets none
    if is_changed:
        view += 1
    view.sum().backward()
    assert len(calls) == is_changed  # else torch's own hook gathers
    assert x.grad.tolist() == [[2.0] * 3] * 2


def test_tensors_of_objects_announce_their_backward():
    x = torch.ones(2, requires_grad=True)
    twice = 2 * x
    inner = SimpleNamespace(same=twice, other={"deep": [3 * x]}, constant=torch.ones(2), layer=nn.Linear(2, 2))
    inner.itself = inner
    calls = gathered_for([SimpleNamespace(inner=inner, name="graph", form=torch.float32), Slotted(4 * x)])
    (inner.same + inner.other["deep"][0]).sum().backward()
    assert len(calls) == 2
