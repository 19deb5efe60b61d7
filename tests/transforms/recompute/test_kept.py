import itertools
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError

from lightning_ups.transforms.compile.compiler import Compiler, compiled
from lightning_ups.transforms.recompute.kept import Samples, note_recomputed_otherwise
from lightning_ups.transforms.recompute.wrapping import recompute
from tests.transforms.contract import Block, Model, grads, saved_bytes
from tests.transforms.recompute.test_second_run import Codebook


class Sum(nn.Linear):
    def forward(self, x, *, shared):
        return super().forward(x).sin() + shared


def test_what_is_kept_agrees_with_autograd_and_is_ordered():
    block, x, kept = Block(), torch.randn(2, 4, 16, requires_grad=True), []
    plain, _ = saved_bytes(block, x)
    for save in ("nothing", ["aten.bmm"], "matmuls"):
        with recompute([block], save=save) as measured:
            block(x).sum().backward()
        assert measured.bytes_without == plain
        kept.append(measured.bytes_kept)
    assert kept[0] == x.nbytes
    assert kept[0] < kept[1] < kept[2] < plain


def test_what_many_blocks_share_counts_once():
    model = Model()
    with recompute(model.layers, save="nothing") as kept:
        grads(model)
    assert kept.bytes_kept == 2 * (2 * 4 * 16) * 4  # the input of each

    blocks, shared = [Sum(8, 8), Sum(8, 8)], torch.randn(4, 8)
    with recompute(blocks, save="nothing") as kept:
        blocks[1](blocks[0](shared, shared=shared), shared=shared).sum().backward()
    assert kept.bytes_kept == 2 * shared.nbytes


def test_buffers_of_the_first_run_are_kept_and_constant_ones_are_not():
    block = Codebook()
    with recompute([block], save="nothing") as kept:
        grads(block, torch.ones(4, 8))
    # The input, a copy of the mean, and the step of before with a copy of it.
    assert kept.bytes_kept == 4 * 8 * 4 + block.mean.nbytes + 2 * block.step.nbytes


def test_only_the_first_call_is_measured():
    block = Block()
    with recompute([block], save="nothing") as kept:
        for batch_size in (1, 4):
            block(torch.randn(batch_size, 4, 16)).sum().backward()
    assert kept.bytes_kept == 4 * 16 * 4


def test_what_blocks_call_is_known_while_it_is_watched_for():
    class Switched(nn.Linear):
        sine = True

        def forward(self, x):
            return super().forward(x).sin() if self.sine else super().forward(x).cos()

    aten, block = torch.ops.aten, Switched(2, 2)
    with recompute([block], save=["aten.addmm"]) as kept:
        for kept.watches, block.sine in ((False, True), (True, False), (False, True)):
            block(torch.ones(1, 2)).sum().backward()
            assert {aten.sin.default, aten.cos.default} & kept.called == ({aten.cos.default} if kept.called else set())
    assert aten.addmm.default in kept.called


def test_a_block_without_anything_to_keep_is_idle_until_it_has():
    block = nn.Linear(2, 2).requires_grad_(False)
    with recompute([block], save="nothing") as kept:
        block(torch.ones(1, 2))
        assert (kept.num_ran, kept.idle) == (0, {block})
        block.requires_grad_(True)
        block(torch.ones(1, 2)).sum().backward()
        assert (kept.num_ran, kept.bytes_without, kept.bytes_kept) == (1, 8, 8)


def test_a_block_called_without_gradients_is_idle():
    block = nn.Linear(2, 2)
    with recompute([block], save="nothing") as kept, torch.no_grad():
        block(torch.ones(1, 2))
    assert (kept.num_ran, kept.idle) == (0, {block})


@pytest.mark.parametrize("called", [True, False])
def test_a_compiled_block_ran_if_it_was_traced_for_training(called):
    class Own(nn.Linear):  # no other test has traced it
        def forward(self, x):
            return super().forward(x).sin()

    block = Own(2, 2)
    with recompute([block], save="nothing") as kept, compiled({"0": block}, Compiler(backend="aot_eager")):
        with torch.no_grad():
            block(torch.ones(1, 2))
        assert kept.num_ran == 0
        if called:
            block(torch.ones(1, 2)).sum().backward()
        assert (kept.num_ran, kept.measured) == (int(called), set())


def test_a_compiled_block_without_anything_to_keep_is_idle_until_it_has():
    class Frozen(nn.Linear):  # no other test has traced it
        def forward(self, x):
            return super().forward(x).sin()

    block = Frozen(2, 2).requires_grad_(False)
    with recompute([block], save="nothing") as kept, compiled({"0": block}, Compiler(backend="aot_eager")):
        assert kept.num_idle == 0
        block(torch.ones(1, 2))
        assert (kept.num_ran, kept.num_idle) == (0, 1)
        block.requires_grad_(True)
        block(torch.ones(1, 2)).sum().backward()
        assert (kept.num_ran, kept.num_idle) == (1, 0)


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


@pytest.mark.parametrize("save", ["nothing", "matmuls"])
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
