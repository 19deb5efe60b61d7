import itertools
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError

from lightning_ups.transforms.recompute.determinism import Samples, note_recomputed_otherwise
from lightning_ups.transforms.recompute.wrapping import recompute

SAVES = ["nothing", "matmuls"]


class Counts(nn.Module):
    """Goes by a count that is in an object of its own."""

    def __init__(self):
        super().__init__()
        self.linear, self.count = nn.Linear(4, 4), itertools.count(1)

    def forward(self, x):
        return (nn.functional.gelu(self.linear(x)) * next(self.count)).sin().cos()


class Remembers(nn.Module):
    """Keeps its last result in a dictionary."""

    def __init__(self):
        super().__init__()
        self.linear, self.memory = nn.Linear(4, 4), {"h": torch.ones(4)}

    def forward(self, x):
        y = self.linear(x + self.memory["h"]).sin().cos()
        self.memory["h"] = y.detach().mean(0)
        return y


@pytest.mark.parametrize(
    ("make", "save", "match"),
    [
        (Counts, "nothing", r"recomputed Counts.*differs from that of the forward.*Leave the block out.*attribute of"),
        (Counts, "matmuls", r"recomputed Counts.*differs from that of the forward.*Leave the block out.*attribute of"),
        (Remembers, "nothing", r"recomputed Remembers.*gradients would be wrong.*Leave the block out"),
        (Remembers, "matmuls", r"recomputed Remembers.*gradients would be wrong.*Leave the block out"),
    ],
)
def test_a_second_run_that_comes_out_otherwise_is_an_error_in_the_first_step(make, save, match):
    torch.manual_seed(0)
    block = make()
    with recompute([block], save=save), pytest.raises(RuntimeError, match=match):
        block(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize("save", SAVES)
def test_a_third_run_is_not_held_against_the_first(save):
    block, x = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Dropout(0.5)), torch.ones(2, 4)
    with recompute([block], save=save):
        loss = block(x).sum()
        loss.backward(retain_graph=save == "nothing")
        if save == "nothing":
            loss.backward()


def apart(first, again):
    """Return whether the second run of something is said to differ."""
    samples = Samples()
    for tensor in first:
        samples.see_first(tensor)
    for tensor in again:
        samples.see_again(tensor)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        samples.check("it")
    return bool(warned)


def test_what_nothing_after_it_goes_by_is_a_warning():
    samples, same, junk = Samples(), torch.ones(3), torch.ones(3)
    for tensor in (same, junk, same, same):
        samples.see_first(tensor)
    for tensor in (same, junk * 7, same, same):
        samples.see_again(tensor)
    with pytest.warns(
        UserWarning, match=r"recomputed it for backward.*1 of 4 tensors.*uninitialized.*Leave the block out"
    ):
        samples.check("it")


def test_last_bits_are_no_difference_and_others_are():
    torch.manual_seed(0)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        x = torch.randn(100, 300).to(dtype)
        assert not apart([x], [x * (1 + torch.finfo(dtype).eps)])
        assert apart([x], [x * 1.1])
        assert apart([x], [x.flip(0)])


def test_few_numbers_of_each_dimension_are_looked_at_and_none_copied_for_that():
    torch.manual_seed(0)
    for shape in ((), (0,), (3, 0), (1,), (5,), (100_000,), (64, 3, 224, 224), (2, 1000, 2)):
        x = torch.randn(shape)
        samples = Samples()
        samples.see_first(x)
        assert samples._first[0].numel() <= min(2 * 4096, max(x.numel(), 1))
        assert not apart([x], [x.clone()])
        assert x.numel() == 0 or apart([x], [x + 1])
    wide = torch.randn(4096, 4096).t()[:, ::2]
    assert not apart([wide], [wide.contiguous()])


def test_masks_count_and_numbers_of_places_do_not():
    mask = torch.rand(64) < 0.5
    assert apart([mask], [~mask])
    assert not apart([torch.arange(8)], [torch.arange(8).flip(0)])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_known(value):
    assert not apart([torch.full((4,), value)], [torch.full((4,), value)])


def test_a_second_run_may_stop_early_and_one_without_numbers_is_alike():
    assert not apart([torch.ones(2), torch.ones(2)], [torch.ones(2)])
    assert not apart([], [])
    assert not apart([torch.ones(2, device="meta")], [torch.ones(2, device="meta")])


@pytest.mark.parametrize(
    "error", [CheckpointError("A different number"), RuntimeError("aten.mm encountered but not found in storage")]
)
def test_an_error_of_torch_says_which_block_and_what_to_do(error):
    note_recomputed_otherwise(error, name="layers.1 (Block)")
    assert "ActivationCheckpoint recomputed layers.1 (Block) for backward" in error.__notes__[0]
    assert "Leave the block out with ActivationCheckpoint(blocks=[...])" in error.__notes__[0]


def test_other_errors_are_left_alone():
    error = RuntimeError("something else")
    note_recomputed_otherwise(error, name="layers.1 (Block)")
    assert not hasattr(error, "__notes__")
