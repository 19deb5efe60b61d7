import pytest
import torch
from torch import nn

from lightning_ups.transforms.compile.compiler import Compiler, compiled
from lightning_ups.transforms.recompute.wrapping import recompute
from tests.transforms.contract import Block, Model, grads, saved_bytes
from tests.transforms.recompute.test_buffers import Codebook


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
