import warnings

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn
from torch.optim.lr_scheduler import ChainedScheduler, ExponentialLR, ReduceLROnPlateau, SequentialLR, StepLR

from lightning_ups._compat.lightning.steps import (
    after_closure,
    bind_scheduler,
    clear_skip,
    skip_if,
    skips_on_device,
    was_skipped,
)
from lightning_ups.callbacks import ActivationCheckpoint, ActivationOffload, Compile, OptimizerOffload
from tests.toys import Net, loader, trainer


class Tells(Net):
    def __init__(self):
        super().__init__()
        self.order = []

    def on_before_optimizer_step(self, optimizer):
        self.order.append("hook")

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.order.append("clip")

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        stock = optimizer.step

        def step(closure):
            closure()
            self.order.append("step")
            stock()

        optimizer.step = step
        return optimizer


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_it_comes_after_all_hooks_and_before_the_step_with_the_gradients_there(tmp_path):
    model, run, given = Tells(), trainer(tmp_path, epochs=1), []

    def note(optimizer):
        model.order.append("here")
        given.append(all(p.grad is not None for group in optimizer.param_groups for p in group["params"]))

    with after_closure(run.precision_plugin, note):
        run.fit(model, loader())
    assert model.order == ["hook", "clip", "here", "step"]
    assert given == [True]
    run.fit_loop.max_epochs = 2
    run.fit(model, loader())
    assert given == [True]
    assert "_after_closure" not in vars(run.precision_plugin)


class Asks(Callback):
    def __init__(self):
        self.answers, self.began_at = [], None

    def on_train_batch_start(self, trainer, *args):
        self.began_at = trainer.global_step

    def on_train_batch_end(self, trainer, pl_module, outputs, *args):
        self.answers.append(was_skipped(pl_module, outputs, began_at=self.began_at))


class SkipsEverySecond(Net):
    def __init__(self, *, wrap):
        super().__init__()
        self.wrap = wrap

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        return None if index % 2 else self.wrap(loss)


class Manual(Net):
    automatic_optimization = False

    def training_step(self, batch, index):
        self.manual_backward(super().training_step(batch, index))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("wrap", [lambda loss: loss, lambda loss: {"loss": loss, "more": torch.ones(2)}])
def test_a_step_that_returns_nothing_was_skipped(tmp_path, wrap):
    asks = Asks()
    trainer(tmp_path, callbacks=[asks], epochs=1).fit(SkipsEverySecond(wrap=wrap), loader(2))
    assert asks.answers == [False, True, False, True]


class StepsFromTheSecond(Manual):
    def __init__(self, *, first=1):
        super().__init__()
        self.first = first

    def training_step(self, batch, index):
        if index >= self.first:
            super().training_step(batch, index)
            self.optimizers().step()
            self.optimizers().zero_grad()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_module_that_optimizes_itself_has_skipped_where_it_makes_no_step(tmp_path):
    asks = Asks()
    trainer(tmp_path, callbacks=[asks], epochs=2).fit(StepsFromTheSecond(), loader(4))
    assert asks.answers == [True, False, True, False]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_it_has_stepped_before_this_fit_does_not_count(tmp_path):
    asks, model = Asks(), StepsFromTheSecond(first=0)
    fitting = trainer(tmp_path, callbacks=[asks], epochs=1)
    fitting.fit(model, loader(4))
    model.first, fitting.fit_loop.max_epochs = 1, 2
    fitting.fit(model, loader(4))
    assert fitting.global_step == 3
    assert asks.answers == [False, False, True, False]


PROVING = {
    "compile": lambda: Compile(backend="aot_eager"),
    "recompute": ActivationCheckpoint,
    "offload activations": lambda: ActivationOffload(min_mb=0),
    "offload the optimizer": lambda: OptimizerOffload(update="host"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("callback", PROVING.values(), ids=PROVING)
def test_a_resumed_module_that_skips_its_first_batch_has_not_shown_that_nothing_was_done(tmp_path, callback):
    right = StepsFromTheSecond(first=0)
    fitting = trainer(tmp_path, epochs=1)
    fitting.fit(right, loader(4))
    fitting.save_checkpoint(tmp_path / "one.ckpt")
    steps = []
    for callbacks in ([], [callback()]):
        resumed = trainer(tmp_path, callbacks=callbacks, epochs=3)
        resumed.fit(StepsFromTheSecond(), loader(4), ckpt_path=tmp_path / "one.ckpt", weights_only=False)
        steps.append(resumed.global_step)
    assert steps == [4, 4]


class Raw(Manual):
    """Steps the optimizer itself, of which Lightning then counts no step."""

    def __init__(self, *, skips=()):
        super().__init__()
        self.skips = skips

    def training_step(self, batch, index):
        if index in self.skips:
            return
        super().training_step(batch, index)
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_steps_that_lightning_does_not_count_are_heard_from_the_second_batch_on(tmp_path):
    asks = [Asks(), Asks()]
    fitting = trainer(tmp_path, callbacks=asks, epochs=3)
    fitting.fit(Raw(skips=[2]), loader(2))
    assert fitting.global_step == 0
    assert asks[0].answers == asks[1].answers == [True, False, True, False, *[False, False, True, False] * 2]


def stepped(optimizer, parameter, flag):
    parameter.grad = torch.full_like(parameter, float("nan") if flag else 1.0)
    skip_if(optimizer, torch.tensor(float(flag)))
    optimizer.step()
    clear_skip(optimizer)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adagrad, {}),
    ],
)
def test_a_skipped_step_changes_nothing_bit_for_bit(kind, options):
    plain, guarded = (nn.Parameter(torch.ones(4)) for _ in range(2))
    by_hand = kind([plain], lr=0.1, weight_decay=0.1, fused=True, **options)
    optimizer = kind([guarded], lr=0.1, weight_decay=0.1, fused=True, **options)
    if kind is torch.optim.Adagrad and not skips_on_device(optimizer):
        pytest.skip("this torch's fused Adagrad reads no flag")
    assert skips_on_device(optimizer)
    for flag in (True, False, False, True, False):
        stepped(optimizer, guarded, flag)
        if not flag:
            plain.grad = torch.ones_like(plain)
            by_hand.step()
    assert torch.equal(plain, guarded)
    for name, value in by_hand.state[plain].items():
        assert torch.equal(value, optimizer.state[guarded][name]), name


def test_a_first_step_that_is_skipped_leaves_no_garbage(monkeypatch):
    stock = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *args, **kwargs: stock(*args, **kwargs).fill_(float("nan")))
    parameter = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, fused=True)
    stepped(optimizer, parameter, flag=True)
    stepped(optimizer, parameter, flag=False)
    assert torch.equal(parameter, torch.full((4,), 0.9))


def test_dampening_is_left_to_the_host():
    assert not skips_on_device(torch.optim.SGD([nn.Parameter(torch.ones(1))], momentum=0.9, dampening=0.1, fused=True))


def test_a_flag_is_taken_back():
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(1))], fused=True)
    skip_if(optimizer, torch.ones(()))
    clear_skip(optimizer)
    assert not {"found_inf", "grad_scale"} & vars(optimizer).keys()
    clear_skip(optimizer)


def test_the_flag_goes_to_the_optimizer_that_steps():
    class Outer(torch.optim.Optimizer):
        def __init__(self, inner):
            self.inner = inner
            super().__init__(inner.param_groups, {})

    inner = torch.optim.AdamW([nn.Parameter(torch.ones(1))], fused=True)
    outer = Outer(inner)
    assert skips_on_device(outer)
    skip_if(outer, torch.ones(()))
    assert "found_inf" in vars(inner)
    assert "found_inf" not in vars(outer)


def optimizers():
    layer = nn.Linear(2, 2)
    old = torch.optim.SGD(layer.parameters(), lr=1.0)
    new = torch.optim.SGD(layer.parameters(), lr=1.0)
    new.param_groups = old.param_groups
    return old, new


def test_a_scheduler_drives_the_new_optimizer_and_torch_does_not_warn():
    old, new = optimizers()
    scheduler = ExponentialLR(old, 0.5)
    bind_scheduler(scheduler, {old: new})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        new.step()
        scheduler.step()
    assert scheduler.optimizer is new
    assert new.param_groups[0]["lr"] == 0.5


def test_torch_still_warns_where_the_optimizer_did_not_step():
    old, new = optimizers()
    scheduler = ExponentialLR(old, 0.5)
    bind_scheduler(scheduler, {old: new})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scheduler.step()
    assert "before `optimizer.step()`" in str(caught[0].message)


def test_schedulers_inside_schedulers_are_bound_and_a_plateau_too():
    old, new = optimizers()
    sequential = SequentialLR(old, [ExponentialLR(old, 0.5), StepLR(old, 2)], milestones=[1])
    chained, plateau = ChainedScheduler([ExponentialLR(old, 0.5)], optimizer=old), ReduceLROnPlateau(old)
    for scheduler in (sequential, chained, plateau):
        bind_scheduler(scheduler, {old: new})
    inner = [*sequential._schedulers, *chained._schedulers]
    assert {s.optimizer for s in [sequential, chained, plateau, *inner]} == {new}
