import pytest
import torch
from torch import nn

from lightning_ups.state.guard import KeptBuffers

BAD, GOOD = torch.ones(()), torch.zeros(())


class Norms(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm1d(4) for _ in range(2))
        self.register_buffer("table", torch.arange(6.0), persistent=False)
        self.register_buffer("nothing", None)
        self.register_buffer("seen", torch.zeros(2, dtype=torch.bool))

    def forward(self, x):
        for norm in self.norms:
            x = norm(x)
        return x * self.table[1]


def stepped(kept, module, flag, x=None):
    kept.keep()
    module(torch.randn(3, 4) if x is None else x)
    kept.take_back(flag)
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_bad_step_leaves_nothing_in_buffers(compiled):
    module = Norms()
    if compiled:
        module.compile(backend="aot_eager")
    kept = KeptBuffers(module)
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    poison = torch.full((3, 4), float("nan"))
    assert same(stepped(kept, module, BAD, poison), before)
    good = stepped(kept, module, GOOD)
    assert not same(good, before)
    assert same(stepped(kept, module, BAD, poison), good)
    assert not same(stepped(kept, module, GOOD), good)


def test_after_the_first_step_only_what_steps_write_is_kept():
    module = Norms()
    kept = KeptBuffers(module)
    stepped(kept, module, GOOD)
    kept.keep()
    assert len(kept._kept) == 2 * 3, "of each norm its mean, its variance and its count"


def test_a_buffer_that_is_replaced():
    module = Norms()
    kept = KeptBuffers(module)
    kept.keep()
    module.table, module.seen = torch.full((6,), 9.0), torch.ones(5, dtype=torch.bool)
    kept.take_back(BAD)
    assert torch.equal(module.table, torch.arange(6.0))
    assert module.seen.shape == (5,), "of another shape: it stays"


def test_what_is_written_later_is_kept_from_then_on():
    module = Norms()
    kept = KeptBuffers(module)
    stepped(kept, module, GOOD)
    for left in (1.0, 1.0):
        kept.keep()
        module.seen.logical_not_()
        kept.take_back(BAD)
        assert module.seen[0] == left


def test_a_tensor_of_inference_stays():
    module = Norms()
    with torch.inference_mode():
        module.table = torch.arange(6.0)
    kept = KeptBuffers(module)
    with torch.no_grad():
        stepped(kept, module, GOOD)
        stepped(kept, module, BAD)
    assert torch.equal(module.table, torch.arange(6.0))


def test_what_no_step_writes_is_not_written_back():
    """It may be one number shown as many, as in `expand`, which nobody can write to."""
    module = Norms()
    module.register_buffer("shown", torch.arange(1.0).expand(4))
    kept = KeptBuffers(module)
    stepped(kept, module, BAD)
    assert module.table._version == 0


@pytest.mark.filterwarnings("ignore")  # of tensors in beta state, and of lazy modules
def test_what_cannot_be_laid_beside_others_is_left():
    module = nn.Sequential(nn.LazyBatchNorm1d(), Norms())
    for name, buffer in {
        "sparse": torch.eye(2).to_sparse(),
        "rows": torch.eye(2).to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        "nested": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
    }.items():
        module.register_buffer(name, buffer)
    kept = KeptBuffers(module)
    for flag in (GOOD, BAD, BAD):
        kept.keep()
        module(torch.randn(3, 4))
        kept.take_back(flag)
    assert module[0].num_batches_tracked == 1


def test_running_statistics_of_a_class_of_ones_own():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("running_mean", torch.zeros(4))
            self.register_buffer("running_var", torch.ones(4))

        def forward(self, x):
            return nn.functional.batch_norm(x, self.running_mean, self.running_var, training=True)

    module = Own()
    kept = KeptBuffers(module)
    stepped(kept, module, GOOD)
    stepped(kept, module, BAD, torch.full((3, 4), float("nan")))
    assert module.running_mean.isfinite().all()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_buffers_that_torchscript_holds_are_put_back_too():
    module = nn.Sequential(torch.jit.script(nn.BatchNorm1d(4)))
    kept = KeptBuffers(module)
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    good = stepped(kept, module, GOOD)
    assert not same(good, before)
    assert same(stepped(kept, module, BAD), good)
