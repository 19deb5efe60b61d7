import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode

from lightning_ups.transforms.fsdp.interrupts import keeping_interrupt


@keeping_interrupt()
def interrupted_between_two_lines():
    with TorchDispatchMode():
        _pop_mode()  # as when the interrupt came before the mode was noted, and the end of the block comes all the same
        raise KeyboardInterrupt("Ctrl-C")


@keeping_interrupt()
def fails():
    torch.ones(2) @ torch.ones(3)


@keeping_interrupt()
def makes_an_error_of_it():
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        raise RuntimeError("mine")  # noqa: B904


@keeping_interrupt()
def interrupted():
    raise KeyboardInterrupt


def test_what_torch_raises_while_it_cleans_up_is_still_an_interrupt():
    with pytest.raises(KeyboardInterrupt, match="Ctrl-C") as caught:
        interrupted_between_two_lines()
    assert "mode stack" in str(caught.value.__cause__)


@pytest.mark.parametrize(
    ("function", "error"),
    [(fails, RuntimeError), (makes_an_error_of_it, RuntimeError), (interrupted, KeyboardInterrupt)],
)
def test_any_other_error_is_left_as_it_is(function, error):
    with pytest.raises(error) as caught:
        function()
    assert caught.value.__cause__ is None
