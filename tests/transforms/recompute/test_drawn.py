import random
import sys
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from lightning_ups.transforms.recompute.drawn import run_with_drawn
from lightning_ups.transforms.recompute.wrapping import recompute


class Draws(nn.Module):
    """Multiplies by what it draws, and remembers that outside of itself."""

    def __init__(self, draw, drawn):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.g, self.r = torch.Generator(), random.Random(0)
        self.n, self.s = np.random.default_rng(0), np.random.RandomState(0)
        self.draw, self.drawn = draw, drawn

    def forward(self, x):
        factor = float(self.draw(self))
        self.drawn.append(factor)
        return (self.linear(x) * factor).tanh().sin()


DRAW = {
    "Python": lambda self: random.random(),
    "Python's normal": lambda self: random.gauss(0, 1),
    "NumPy": lambda self: np.random.rand(),
    "NumPy's normal": lambda self: np.random.randn(),
    "torch's": lambda self: torch.rand((), generator=self.g),
    "own of Python": lambda self: self.r.random(),
    "own of NumPy": lambda self: self.n.random(),
    "own of old NumPy": lambda self: self.s.rand(),
}


def stream(draw, between, context):
    """Return what each of three steps draws, and what is drawn after them."""
    random.seed(0), np.random.seed(0)
    block, steps = Draws(draw, []), []
    with context([block]):
        for _ in range(3):
            losses = [block(torch.ones(2, 4)).sum() for _ in range(2)]
            for _ in range(between):
                draw(block)
            losses[1].backward(), losses[0].backward()
            steps.append([*block.drawn])
            block.drawn.clear()
    return steps, float(draw(block))


@pytest.mark.parametrize("between", [0, 1, 700])  # the Mersenne Twister has 624 numbers
@pytest.mark.parametrize("save", ["nothing", "matmuls"])
@pytest.mark.parametrize("draw", DRAW.values(), ids=DRAW.keys())
def test_the_second_run_draws_what_the_first_did_and_the_stream_goes_on(draw, save, between):
    expected, after = stream(draw, between, nullcontext)
    steps, same = stream(draw, between, partial(recompute, save=save))
    assert same == after
    assert steps == [[first, second, second, first] for first, second in expected]  # backward begins at the last


def test_a_number_of_numpy_that_is_left_over_is_used_up_again():
    np.random.seed(0)
    np.random.randn()  # leaves the second of a pair
    run_with_drawn([], [], lambda: None)  # sees that there is one
    np.random.randn()  # uses it up, by which the twister does not move
    expected = np.random.get_state()
    drawn = []
    run_with_drawn(before := [], [], lambda: drawn.append(np.random.randn()))
    np.random.rand()
    run_with_drawn(before, [], lambda: drawn.append(np.random.randn()))
    np.random.set_state(expected)
    assert drawn == [np.random.randn()] * 2


def test_an_error_in_the_second_run_leaves_the_stream_as_it_was():
    random.seed(0)
    run_with_drawn(before := [], [], random.random)

    def fail():
        random.random()
        raise KeyError

    expected = random.Random(0)
    expected.random()
    with pytest.raises(KeyError):
        run_with_drawn(before, [], fail)
    assert random.random() == expected.random()


@pytest.mark.parametrize("bits", [None, "PCG64"])
def test_another_generator_behind_numpy_is_put_back_too(monkeypatch, bits):
    own = np.random.get_bit_generator()
    if bits is None:  # as before NumPy 1.24
        monkeypatch.delattr(np.random, "get_bit_generator")
    else:
        np.random.set_bit_generator(getattr(np.random, bits)(0))
    try:
        drawn = []
        run_with_drawn(before := [], [], lambda: drawn.append(np.random.rand()))
        drawn.append(np.random.rand())
        run_with_drawn(before, [], lambda: drawn.append(np.random.rand()))
    finally:
        if bits is not None:
            np.random.set_bit_generator(own)
    assert drawn[0] == drawn[2] != drawn[1]


def test_numpy_need_not_be_loaded(monkeypatch):
    monkeypatch.delitem(sys.modules, "numpy.random")
    drawn = []
    run_with_drawn(before := [], [], lambda: drawn.append(random.random()))
    run_with_drawn(before, [], lambda: drawn.append(random.random()))
    assert drawn[0] == drawn[1]


def test_what_has_no_state_to_tell_is_left_alone():
    assert run_with_drawn([], [random.SystemRandom()], partial(int, 1)) == 1
