import pytest
import torch
from torch import nn

from lightning_ups.state.guard import Deferred, KeptBuffers, LossWatch, Saved, Verdict

NAN, INF = float("nan"), float("inf")
BAD, GOOD = torch.ones(()), torch.zeros(())


def judged(watch, *values):
    return [Verdict.of(watch.judge(torch.tensor([loss, 1.0])).tolist()) for loss in values]


def watch(**settings):
    return LossWatch(torch.device("cpu"), **({"window": 8, "least": 4} | settings))


def steady(number):
    return [1.0 + 0.1 * (-1) ** index for index in range(number)]


def test_what_is_not_finite_is_seen_at_once():
    first, second, third = judged(watch(), NAN, 1.0, INF)
    assert (first.nonfinite, second.nonfinite, third.nonfinite) == (True, False, True)
    assert (first.spike, third.spike) == (False, False)


def test_a_spike_stands_out_from_what_was_before():
    *calm, spike, after = judged(watch(), *steady(8), 3.0, 1.0)
    assert not any(verdict.spike for verdict in calm)
    assert (spike.spike, after.spike) == (True, False)
    assert spike.loss_limit == pytest.approx(1.0 + 6 * 0.1)


def test_nothing_is_a_spike_before_there_is_enough_to_compare():
    assert [verdict.spike for verdict in judged(watch(), 1.0, 1.0, 1.0, 50.0)] == [False] * 4
    assert judged(watch(), 1.0, 1.0, 1.0, 1.0, 50.0)[-1].spike


def test_rounding_of_a_constant_loss_is_no_spike():
    assert not judged(watch(), *[2.0] * 8, 2.000001)[-1].spike


def test_a_spike_does_not_hide_the_next():
    assert [verdict.spike for verdict in judged(watch(), *steady(8), 1e6, 10.0)[-2:]] == [True, True]


def test_a_level_that_stays_becomes_usual():
    verdicts = judged(watch(), *steady(8), *[1.8] * 12)
    assert verdicts[8].spike
    assert not verdicts[-1].spike


def test_what_is_not_finite_does_not_poison_the_memory():
    verdicts = judged(watch(), *steady(8), NAN, INF, 1.0, 3.0)
    assert [verdict.spike for verdict in verdicts[-2:]] == [False, True]


def test_the_norm_is_watched_too():
    both = watch()
    for _ in range(6):
        both.judge(torch.tensor([1.0, 1.0]))
    verdict = Verdict.of(both.judge(torch.tensor([1.0, 9.0])).tolist())
    assert verdict.spike
    assert str(verdict).startswith("the gradients' norm is 9, a spike above 1.0")


@pytest.mark.gpu(count=1)
def test_the_host_reads_nothing():
    watched, values = LossWatch(torch.device("cuda"), window=8, least=2), torch.tensor([1.0, 2.0], device="cuda")
    watched.judge(values)
    torch.cuda.set_sync_debug_mode("error")
    try:
        verdicts = [watched.judge(values) for _ in range(10)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not Verdict.of(verdicts[-1].tolist()).spike


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([1, 0, NAN, 2.0, INF, INF], "the loss is nan"),
        ([1, 0, NAN, INF, INF, INF], "the loss is nan and the gradients' norm is inf"),
        ([0, 1, 9.0, 2.0, 3.0, INF], "the loss is 9, a spike above 3"),
        ([0, 0, 1.5, 2.0, 3.0, INF], "the loss is 1.5"),
    ],
)
def test_a_verdict_is_said_in_words(values, text):
    assert str(Verdict.of(values)) == text


def test_float64_is_judged_in_float64_from_the_first_value_in_it_on():
    watch = LossWatch(torch.device("cpu"), window=8, least=2)
    for value in (1.0, 2.0, 1.0):
        assert not Verdict.of(watch.judge(torch.tensor([value, value])).tolist()).nonfinite
    huge = Verdict.of(watch.judge(torch.tensor([1e40, 1.0], dtype=torch.float64)).tolist())
    assert (huge.nonfinite, huge.spike, huge.loss) == (False, True, 1e40)
    again = watch.judge(torch.tensor([1.0, 1.0]))
    assert again.dtype is torch.float64


def test_values_are_read_a_fixed_number_of_steps_late():
    queue, seen = Deferred(late=2), []
    for step in range(5):
        queue.push(torch.tensor([float(step)]), step)
        seen.append([*queue.due()])
    assert seen == [[], [], [([0.0], 0)], [([1.0], 1)], [([2.0], 2)]]
    assert [*queue.rest()] == [([3.0], 3), ([4.0], 4)]


@pytest.mark.gpu(count=1)
def test_nobody_waits_for_the_device():
    queue, a = Deferred(late=1), torch.randn(4096, 4096, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            a = (a @ a).clamp(-1, 1)
        queue.push(a[0, :2], "a")
        assert [*queue.due()] == []
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert next(queue.rest())[1] == "a"


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


def whole(folder, name):
    torch.save({"state": 1}, folder / name)
    return folder / name


def test_the_newest_that_is_whole_and_fits(tmp_path):
    saved, one, two = Saved(), ((2,),), ((2, 1),)
    for step, layout in ((1, one), (2, one), (3, two), (5, two)):
        saved.add(whole(tmp_path, f"{step}"), step=step, layout=layout)
    assert saved.newest(step=4, layout=two) == tmp_path / "3"
    assert saved.newest(step=4, layout=one) == tmp_path / "2"
    assert saved.newest(step=2, layout=two) is None
    assert saved.others(step=2, layout=two) == [tmp_path / "1", tmp_path / "2"]
    assert saved.others(step=4, layout=one) == [tmp_path / "3"]
    (tmp_path / "2").unlink()
    assert saved.newest(step=4, layout=one) == tmp_path / "1"


def test_what_is_saved_again_under_a_name_is_no_longer_what_it_was(tmp_path):
    saved, layout = Saved(), ((1,),)
    saved.add(whole(tmp_path, "last"), step=1, layout=layout)
    saved.add(tmp_path / "last", step=4, layout=layout)
    assert saved.newest(step=3, layout=layout) is None
    saved.forget(tmp_path / "last")
    assert saved.newest(step=9, layout=layout) is None


def test_what_comes_after_a_step_is_undone(tmp_path):
    saved, layout = Saved(), ((1,),)
    for step in (1, 4, 5):
        saved.add(whole(tmp_path, f"{step}"), step=step, layout=layout)
    (tmp_path / "5").unlink()
    assert saved.undo(step=3) == [tmp_path / "4"]
    assert saved.undo(step=3) == []
    assert saved.newest(step=9, layout=layout) == tmp_path / "1"


def test_what_no_step_writes_is_not_written_back():
    """It may be one number shown as many, as in `expand`, which nobody can write to."""
    module = Norms()
    module.register_buffer("shown", torch.arange(1.0).expand(4))
    kept = KeptBuffers(module)
    stepped(kept, module, BAD)
    assert module.table._version == 0
