from contextlib import ExitStack

import pytest
import torch
from torch import nn

from lightning_ups.transforms.pipeline import Stages, cut_model, drop_others


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, shift=None):
        out = x + self.two(self.one(x).tanh())
        return out if shift is None else out + shift


class Model(nn.Module):
    """A step, with what is wrong in some of the cases."""

    def __init__(self, fault=None):
        super().__init__()
        self.fault = fault
        self.embed, self.condition = nn.Linear(4, 4), nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(4, 1)

    def step(self, x):
        shift = self.condition(x) if self.fault == "shift" else None
        h = self.embed(x)
        if self.fault == "head first":
            h = h + self.head(h)
        blocks = reversed(self.blocks) if self.fault == "order" else self.blocks
        for block in blocks:
            if self.fault == "by name":
                h = block(x=h)
            elif self.fault == "in a tuple":
                h = self.tupled(block, h)
            else:
                h = block(h, shift)
        if self.fault == "twice":
            h = self.blocks[3](h)
        return self.head(h).sum()

    def tupled(self, block, h):
        (out,) = block(h) if isinstance(block, Tupled) else (block(h),)
        return out


class Tupled(Block):
    def forward(self, x):
        return (super().forward(x),)


def stages_of(fault=None, rank=0, block=Block, *, whole=False):
    torch.manual_seed(0)
    model = Model(fault)
    if block is not Block:
        for index in range(4):
            made = block()
            made.load_state_dict(model.blocks[index].state_dict())
            model.blocks[index] = made
    undo = ExitStack()
    cut = cut_model(model, size=2, schedule="1F1B", rank=rank)
    if not whole:
        drop_others(model, cut, device=torch.device("cpu"))
        stages = Stages(model, cut, undo=undo)
        stages.kept = undo
        return model, stages, undo
    return model, None, undo


X = torch.randn(3, 4)


@pytest.mark.parametrize(("fault", "block"), [(None, Block), ("by name", Block), ("in a tuple", Tupled)])
def test_two_stages_are_the_whole_step(fault, block):
    (first, stages, _), (last, others, _) = stages_of(fault, 0, block), stages_of(fault, 1, block)
    right = stages_of(fault, block=block, whole=True)[0]
    hidden = stages.rehearse(0, lambda: first.step(X), received=None)
    others.structure = stages.structure
    others.rehearse(1, lambda: last.step(X), received=hidden)
    out = stages.run(0, lambda: first.step(X), received=None, seed=0)
    received = out.detach().requires_grad_()
    result = others.run(1, lambda: last.step(X), received=received, seed=0)
    torch.testing.assert_close(result, right.step(X))
    result.backward()
    out.backward(received.grad)
    right.step(X).backward()
    for model in (first, last):
        for name, p in model.named_parameters():
            if "condition" not in name:
                torch.testing.assert_close(p.grad, right.get_parameter(name).grad)


def test_random_numbers_before_the_blocks_are_those_of_all_stages():
    drawn = []

    def noisy(model):
        drawn.append(torch.rand(()).item())
        return model.step(X)

    (first, stages, _), (last, others, _) = stages_of(rank=0), stages_of(rank=1)
    hidden = stages.run(0, lambda: noisy(first), received=None, seed=5)
    others.run(1, lambda: noisy(last), received=hidden.detach(), seed=5)
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("order", "once, in this order; blocks.3 was called as number 0"),
        ("head first", "The output of stage 0 is NaN"),
        ("shift", "blocks.2 has a second input that depends on parameters of the first stage"),
    ],
)
def test_a_step_that_cannot_be_divided_is_refused(fault, words):
    def rehearse():
        (first, stages, _), (last, others, _) = stages_of(fault, 0), stages_of(fault, 1)
        hidden = stages.rehearse(0, lambda: first.step(X), received=None)
        others.rehearse(1, lambda: last.step(X), received=hidden)

    with pytest.raises(ValueError, match=words):
        rehearse()


def test_a_block_that_is_called_twice_is_refused():
    model, stages, _ = stages_of("twice", 1)
    with pytest.raises(ValueError, match=r"blocks\.3 was called as number 4"):
        stages.run(1, lambda: model.step(X), received=X, seed=0)


def test_a_step_without_blocks_is_refused():
    _, stages, _ = stages_of()
    with pytest.raises(ValueError, match="0 of 4 blocks were called"):
        stages.run(1, lambda: None, received=X, seed=0)


def test_a_block_outside_of_a_step_is_refused_until_the_end():
    model, _, undo = stages_of()
    with pytest.raises(ValueError, match=r"blocks\.0 is called outside of training_step"):
        model.blocks[0](X)
    undo.close()
    model.blocks[0](X)


class Writing(Block):
    seen = 0.0

    def forward(self, x, shift=None):
        self.seen = x.mean()
        return super().forward(x)


def test_skipped_blocks_and_their_attributes_are_nan_within_a_step():
    (first, stages, _), (last, others, _) = stages_of(None, 0, Writing), stages_of(None, 1, Writing)
    hidden = stages.rehearse(0, lambda: first.step(X), received=None)
    others.structure = stages.structure
    others.rehearse(1, lambda: last.step(X), received=hidden)
    step = lambda: (last.step(X), [torch.as_tensor(block.seen).isnan() for block in last.blocks])  # noqa: E731
    result, seen = others.run(1, step, received=hidden, seed=0)
    assert seen == [True, True, False, False]
    assert not result.isnan()
    assert last.blocks[0].seen == 0.0


class Longer(Block):
    def forward(self, x, shift=None):
        return torch.cat((x, x))


def test_blocks_of_other_shapes_are_refused():
    model, stages, _ = stages_of(rank=1, block=Longer)
    with pytest.raises(ValueError, match="of one shape and dtype"):
        stages.rehearse(1, lambda: model.step(X), received=X)
