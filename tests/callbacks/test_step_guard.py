"""StepGuard leaves bad steps out, or takes the run back before them, on all ranks alike."""

from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader

from lightning_ups.callbacks import ActivationCheckpoint, OptimizerOffload, RunManifest, StepGuard
from lightning_ups.precision import BF16Precision
from tests.toys import Net
from tests.toys import trainer as run_of

NAN = float("nan")


class Bad(Net):
    """Has a loss of ``factor`` times what it should be at the batches ``bad``."""

    def __init__(self, bad=(), *, factor=NAN, optimizer=None, schedule=False):
        super().__init__()
        self.bad, self.factor = set(bad), factor
        self.optimizer = optimizer or (lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True))
        self.schedule = schedule

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        return loss * self.factor if index in self.bad else loss

    def configure_optimizers(self):
        optimizer = self.optimizer(self.parameters())
        if not self.schedule:
            return optimizer
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 40)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def batches(count=24, *, without=()):
    torch.manual_seed(1)
    rows = torch.randn(count, 4, 8)
    return DataLoader([row for index, row in enumerate(rows) if index not in without], batch_size=None)


def fit(folder, module, guard=None, *, data=None, callbacks=(), ckpt_path=None, weights_only=None, **options):
    saves = any(isinstance(c, ModelCheckpoint) for c in callbacks)
    options = {"max_epochs": 1, "devices": 1, "enable_checkpointing": saves, **options}
    made = run_of(folder, callbacks=[*([guard] if guard else []), *callbacks], **options)
    made.fit(module, data or batches(), ckpt_path=ckpt_path, weights_only=weights_only)
    return made


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


OPTIMIZERS = {
    "fused": None,
    "plain": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "momentum": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, weight_decay=0.1),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_run_with_a_skipped_step_is_the_run_without_its_batch(tmp_path, kind, clip):
    guarded, without = (Bad(bad, optimizer=OPTIMIZERS[kind]) for bad in ([0, 5], []))
    guard = StepGuard()
    fit(tmp_path, guarded, guard, gradient_clip_val=clip)
    fit(tmp_path, without, data=batches(without=[0, 5]), gradient_clip_val=clip)
    assert same(guarded, without)
    assert [(event.step, event.kind, event.done) for event in guard.events] == [
        (0, "nonfinite", "the step was skipped"),
        (5, "nonfinite", "the step was skipped"),
    ]
    assert "the loss is nan" in guard.events[0].what


class Normed(Bad):
    """Gets its NaN from the data, through a layer that keeps running statistics."""

    def __init__(self, bad=(), **options):
        super().__init__(bad, **options)
        self.norm = torch.nn.BatchNorm1d(8)

    def training_step(self, batch, index):
        batch = torch.full_like(batch, NAN) if index in self.bad else batch
        return Net.training_step(self, self.norm(batch), index)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_running_statistics_are_those_of_the_run_without_the_batch(tmp_path, kind, accumulate):
    guarded, without = (Normed(bad, optimizer=OPTIMIZERS[kind]) for bad in ([0, 4], []))
    left_out = [0, 4] if accumulate == 1 else [0, 1, 4, 5]
    fit(tmp_path, guarded, StepGuard(), accumulate_grad_batches=accumulate)
    fit(tmp_path, without, data=batches(without=left_out), accumulate_grad_batches=accumulate)
    assert all(map(torch.equal, guarded.state_dict().values(), without.state_dict().values()))


def test_without_the_guard_the_run_is_lost(tmp_path):
    module = Bad([5])
    fit(tmp_path, module)
    assert not all(p.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize("skip_on", ["device", "host"])
def test_gradients_are_watched_where_the_loss_is_finite(tmp_path, skip_on):
    class Infinite(Bad):
        def on_after_backward(self):
            if self.trainer.fit_loop.batch_idx == 3:
                self.head.weight.grad[0, 0] = float("inf")

    module = Infinite()
    guard = StepGuard(skip_on=skip_on)
    fit(tmp_path, module, guard)
    assert all(p.isfinite().all() for p in module.parameters())
    assert [event.what for event in guard.events] == ["the gradients' norm is inf"]


def test_the_host_reads_nothing_before_the_step_where_the_device_skips(tmp_path, monkeypatch):
    reads = []
    stock = torch.Tensor.item
    monkeypatch.setattr(torch.Tensor, "item", lambda tensor: reads.append(tensor) or stock(tensor))
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda tensor: reads.append(tensor) or stock(tensor) != 0)

    class Hook(Callback):
        during = 0

        def on_before_optimizer_step(self, *_):
            Hook.during = len(reads)

    class Before(Callback):
        def on_after_backward(self, *_):
            reads.clear()

    fit(tmp_path, Bad([5]), StepGuard(skip_on="device"), callbacks=[Before(), Hook()])
    assert Hook.during == 0
    fit(tmp_path, Bad([5]), StepGuard(skip_on="host"), callbacks=[Before(), Hook()])
    assert Hook.during > 0  # the check can fail


class Looks(Bad):
    """Reads gradients in the hooks of a module that come before the step, and notes what they were."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.norms = []

    def look(self):
        self.norms.append(self.head.weight.grad.norm().item())

    def on_before_optimizer_step(self, optimizer):
        self.look()

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.look()
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)


class LooksToo(Callback):
    def on_before_optimizer_step(self, trainer, module, optimizer):
        module.look()


BESIDE = {
    "alone": dict,
    "masters": lambda: {"plugins": [BF16Precision(weights="masters")]},
    "autocast": lambda: {"plugins": [BF16Precision(weights="autocast")]},
    "offload": lambda: {"callbacks": [OptimizerOffload(update="host")]},
    "offload of masters": lambda: {
        "callbacks": [OptimizerOffload(update="host")],
        "plugins": [BF16Precision(weights="masters")],
    },
    "accumulation": lambda: {"accumulate_grad_batches": 2},
}


@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("kind", ["plain", "momentum", "fused on the host"])
def test_who_looks_at_the_gradients_of_a_skipped_step_finds_them(tmp_path, kind, clip, beside):
    optimizer = OPTIMIZERS[kind.removesuffix(" on the host")]
    guarded, without = Looks([4], optimizer=optimizer), Looks(optimizer=optimizer)
    guard = StepGuard(skip_on="host")
    mine, right = BESIDE[beside](), BESIDE[beside]()
    mine["callbacks"] = [guard, LooksToo(), *mine.get("callbacks", [])]
    right["callbacks"] = [LooksToo(), *right.get("callbacks", [])]
    made = fit(tmp_path, guarded, gradient_clip_val=clip, **mine)
    left_out = [4, 5] if beside == "accumulation" else [4]
    other = fit(tmp_path, without, data=batches(without=left_out), gradient_clip_val=clip, **right)
    assert [event.step for event in guard.events] == [2 if beside == "accumulation" else 4]
    finite = [value for value in guarded.norms if value == value]
    assert len(guarded.norms) == len(finite) + 3
    assert finite == without.norms
    assert same(guarded, without)
    states = [run.optimizers[0].state_dict()["state"] for run in (made, other)]
    assert str(states[0]) == str(states[1])
    assert "_after_closure" not in vars(made.precision_plugin)


class Recipe(Bad):
    """Steps at every second batch, as Lightning's documentation of `optimizer_step` shows."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        if batch_idx % 2:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


class Accumulates(Recipe):
    """Keeps the gradients of the batches in between, and so divides nothing by their number."""

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        if batch_idx % 2 == 0:
            optimizer.zero_grad()


def test_a_bad_batch_whose_gradients_are_discarded_is_of_no_step(tmp_path):
    guarded, without = Recipe([8]), Bad()
    fit(tmp_path, guarded, guard := StepGuard(gradients=False))
    fit(tmp_path, without, data=batches(without=range(0, 24, 2)))
    assert not guard.events
    assert same(guarded, without)


def test_a_bad_batch_whose_gradients_are_kept_by_the_module_is_of_their_step(tmp_path):
    fit(tmp_path, module := Accumulates([8]), guard := StepGuard(gradients=False))
    assert [(event.step, event.batch) for event in guard.events] == [(9, 9)]
    assert all(p.isfinite().all() for p in module.parameters())


class Huge(Bad):
    """Has losses and gradients that no float32 can hold."""

    def training_step(self, batch, index):
        return super().training_step(batch, index) * 1e40


@pytest.mark.parametrize("kind", ["fused", "plain"])
def test_float64_is_judged_in_float64(tmp_path, kind):
    optimizer = OPTIMIZERS[kind]
    guarded, plain = Huge([5], optimizer=optimizer), Huge(optimizer=optimizer)
    in_float64 = DataLoader([row.double() for row in batches().dataset], batch_size=None)
    without = DataLoader([row for index, row in enumerate(in_float64.dataset) if index != 5], batch_size=None)
    fit(tmp_path, guarded, guard := StepGuard(warmup_steps=2), data=in_float64, precision="64-true")
    fit(tmp_path, plain, data=without, precision="64-true")
    assert [(event.step, event.kind) for event in guard.events] == [(5, "nonfinite")]
    assert same(guarded, plain)


def test_a_loss_of_float64_is_judged_so_beside_weights_of_float32(tmp_path):
    class Mixed(Bad):
        def training_step(self, batch, index):
            return super().training_step(batch, index).double() + (1e41 if index == 12 else 1e40)

    fit(tmp_path, Mixed(), guard := StepGuard(warmup_steps=4))
    assert [(event.step, event.kind) for event in guard.events] == [(12, "spike")]
    assert "the loss is 1e+41, a spike above" in guard.events[0].what


def test_spikes_are_skipped(tmp_path):
    guarded, without = Bad([20], factor=1e4), Bad()
    guard = StepGuard(on_spike="skip", warmup_steps=8, sigmas=8.0)
    fit(tmp_path, guarded, guard)
    fit(tmp_path, without, data=batches(without=[20]))
    assert same(guarded, without)
    (event,) = guard.events
    assert (event.step, event.batch, event.kind) == (20, 20, "spike")
    assert "a spike above" in event.what


class LeavesOut(Bad):
    def training_step(self, batch, index):
        return super().training_step(batch, index // 2) if index % 2 else None


@pytest.mark.filterwarnings("ignore:.*training_step.*returned.*None:UserWarning")
def test_a_batch_that_is_left_out_is_no_loss_of_zero(tmp_path):
    right, guard = StepGuard(warmup_steps=5), StepGuard(warmup_steps=5)
    fit(tmp_path, Bad([8], factor=100.0), right, data=batches(without=range(0, 24, 2)))
    fit(tmp_path, LeavesOut([8], factor=100.0), guard)
    assert [event.what for event in guard.events] == [event.what for event in right.events]
    assert [event.step for event in right.events] == [8]


def test_a_warning_changes_nothing(tmp_path):
    warned, plain = Bad([20], factor=1e4), Bad([20], factor=1e4)
    guard = StepGuard(on_spike="warn", warmup_steps=8)
    fit(tmp_path, warned, guard)
    fit(tmp_path, plain)
    assert same(warned, plain)
    assert guard.events[0].done == "nothing was done"


def test_a_guard_that_sees_nothing_changes_nothing(tmp_path):
    guarded, plain = Bad(schedule=True), Bad(schedule=True)
    fit(tmp_path, guarded, StepGuard(on_spike="skip"), gradient_clip_val=0.1, accumulate_grad_batches=3)
    fit(tmp_path, plain, gradient_clip_val=0.1, accumulate_grad_batches=3)
    assert same(guarded, plain)


def test_an_accumulation_is_skipped_whole(tmp_path):
    guarded, without = Bad([4]), Bad()
    guard = StepGuard()
    fit(tmp_path, guarded, guard, accumulate_grad_batches=3)
    fit(tmp_path, without, data=batches(without=[3, 4, 5]), accumulate_grad_batches=3)
    assert same(guarded, without)
    assert [(event.step, event.batch) for event in guard.events] == [(1, 5)]


@pytest.mark.parametrize("kind", ["fused", "plain"])
def test_master_weights_are_guarded(tmp_path, kind):
    guarded, without = (Bad(bad, optimizer=OPTIMIZERS[kind]) for bad in ([5], []))
    fit(tmp_path, guarded, guard := StepGuard(), plugins=[BF16Precision(weights="masters")], gradient_clip_val=0.5)
    fit(tmp_path, without, data=batches(without=[5]), plugins=[BF16Precision(weights="masters")], gradient_clip_val=0.5)
    assert same(guarded, without)
    assert len(guard.events) == 1


class Words(Bad):
    """Looks words up, whose gradients are sparse."""

    def __init__(self, bad=()):
        super().__init__(bad, optimizer=lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9))
        self.words = torch.nn.Embedding(16, 8, sparse=True)

    def training_step(self, batch, index):
        return super().training_step(batch + self.words(torch.tensor([index % 5, 7, 7, 9])), index)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.parametrize("plugins", [[], [BF16Precision(weights="autocast")]], ids=["float32", "bf16"])
def test_sparse_gradients_are_watched_and_skipped(tmp_path, plugins):
    guarded, same_bits = Words([5]), Words([5])
    fit(tmp_path, guarded, guard := StepGuard(), plugins=plugins)
    assert [event.step for event in guard.events] == [5]
    assert all(p.isfinite().all() for p in guarded.parameters())
    fit(tmp_path, same_bits, StepGuard(gradients=False), plugins=plugins)
    assert same(guarded, same_bits)


MADE_BEFOREHAND = {  # have their state before the first step, and so nothing is new after one that was left out
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, fused=True),
}


@pytest.mark.parametrize("kind", MADE_BEFOREHAND)
def test_master_weights_may_begin_with_a_bad_step(tmp_path, kind):
    guarded, without = (Bad(bad, optimizer=MADE_BEFOREHAND[kind]) for bad in ([0], []))
    fit(tmp_path, guarded, guard := StepGuard(), plugins=[BF16Precision(weights="masters")])
    fit(tmp_path, without, data=batches(without=[0]), plugins=[BF16Precision(weights="masters")])
    assert same(guarded, without)
    assert [event.step for event in guard.events] == [0]


def test_bad_steps_in_a_row_end_the_run(tmp_path):
    with pytest.raises(RuntimeError, match=r"Step 7 .*These are 4 bad steps in a row.*Lower the learning rate"):
        fit(tmp_path, Bad(range(4, 24)), StepGuard(max_in_a_row=3))
    fit(tmp_path, Bad([2, 3, 4, 6, 7, 8]), StepGuard(max_in_a_row=3))


def test_a_run_may_be_stopped(tmp_path):
    with pytest.raises(RuntimeError, match=r"Step 5 \(epoch 0, batch 5\): the loss is nan.*resume from the last"):
        fit(tmp_path, Bad([5]), StepGuard(on_nonfinite="stop"))


@pytest.mark.parametrize("beside", [(), (ActivationCheckpoint(blocks=["layers.*"]),)], ids=["alone", "beside a step"])
def test_the_manifest_has_what_happened(tmp_path, beside):
    manifest = RunManifest()
    fit(tmp_path, Bad([5]), StepGuard(), callbacks=[manifest, *beside])
    part = manifest.manifest["report"]["StepGuard"]
    assert part["events"][0]["step"] == 5
    assert part["on_device"] is True


# Going back


def saving(folder, every=4):
    return ModelCheckpoint(dirpath=folder / "saved", every_n_train_steps=every, save_top_k=-1)


def test_going_back_is_the_run_without_what_lies_between(tmp_path):
    """Saved at step 8; batches 8, 9 and the bad 10 are undone, and training goes on with batch 11."""
    guarded, without = Bad([10], schedule=True), Bad(schedule=True)
    guard = StepGuard(on_nonfinite="rollback")
    made = fit(tmp_path, guarded, guard, callbacks=[saving(tmp_path)])
    other = fit(tmp_path, without, data=batches(without=[8, 9, 10]))
    assert same(guarded, without)
    assert made.global_step == other.global_step == 21
    assert made.lr_scheduler_configs[0].scheduler.state_dict() == other.lr_scheduler_configs[0].scheduler.state_dict()
    (event,) = guard.events
    assert "were restored to step 8" in event.done
    assert "(1 of 3 times)" in event.done


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("asked", [True, False, None])
def test_rolling_back_restricts_loading_like_fit(tmp_path, monkeypatch, asked):
    told = []

    def load(self, path, weights_only=None):
        told.append((Path(path).name, weights_only))
        return stock(self, path, weights_only=weights_only)

    stock = SingleDeviceStrategy.load_checkpoint
    monkeypatch.setattr(SingleDeviceStrategy, "load_checkpoint", load)
    options = {"guard": StepGuard(on_nonfinite="rollback"), "weights_only": asked}
    fit(tmp_path, Bad([10]), callbacks=[saving(tmp_path)], **options)
    assert [weights_only for _, weights_only in told] == [bool(asked)], "this run wrote it"
    old = next((tmp_path / "saved").glob("*step=8.ckpt"))
    told.clear()
    fit(tmp_path / "again", Bad([10]), callbacks=[saving(tmp_path / "again", every=100)], ckpt_path=old, **options)
    assert told == [(old.name, asked)] * 2, "somebody else may have written it"


def test_a_spike_goes_back_too(tmp_path):
    guarded, without = Bad([18], factor=1e4), Bad()
    fit(tmp_path, guarded, StepGuard(on_spike="rollback", warmup_steps=8, sigmas=8.0), callbacks=[saving(tmp_path)])
    fit(tmp_path, without, data=batches(without=[16, 17, 18]))
    assert same(guarded, without)


def test_masters_go_back(tmp_path):
    guarded, without = Bad([10]), Bad()
    guard = StepGuard(on_nonfinite="rollback")
    fit(tmp_path, guarded, guard, callbacks=[saving(tmp_path)], plugins=[BF16Precision(weights="masters")])
    fit(tmp_path, without, data=batches(without=[8, 9, 10]), plugins=[BF16Precision(weights="masters")])
    assert same(guarded, without)


def test_a_checkpoint_of_the_bad_step_or_later_is_not_taken(tmp_path):
    class Late(Callback):
        def on_train_start(self, trainer, module):
            guard._verdicts.late = 2  # as on a GPU: steps 4 and 5 are saved before the bad one, 3, is read

    guard = StepGuard(on_nonfinite="rollback")
    fit(tmp_path, Bad([3]), guard, callbacks=[saving(tmp_path, every=1), Late()])
    assert "were restored to step 3" in guard.events[0].done


def test_a_checkpoint_of_a_stretch_that_was_undone_is_never_taken(tmp_path):
    class Late(Callback):
        def on_train_start(self, trainer, module):
            guard._verdicts.late = 2

        def on_train_batch_end(self, trainer, module, outputs, batch, index):
            if index in (3, 6):  # the second has the bad step, 5, in it, and is the newest from then on
                trainer.save_checkpoint(tmp_path / "saved" / f"{index}.ckpt")

    guard, module = StepGuard(on_nonfinite="rollback"), Bad([5, 15])
    fit(tmp_path, module, guard, callbacks=[saving(tmp_path, every=1000), Late()])
    first, second = (event.done for event in guard.events)
    assert "were restored to step 4" in first
    assert f"containing the bad step: {tmp_path / 'saved' / '6.ckpt'}" in first
    assert "were restored to step 4" in second
    assert "containing the bad step" not in second
    assert all(p.isfinite().all() for p in module.parameters())


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_that_was_saved_again_is_the_newer_one(tmp_path):
    """As last.ckpt is, which holds the bad step where the verdict is late."""

    class Late(Callback):
        def on_train_start(self, trainer, module):
            guard._verdicts.late = 2

    guard, module = StepGuard(on_nonfinite="rollback"), Bad([7])
    keeps = ModelCheckpoint(dirpath=tmp_path / "saved", every_n_train_steps=2, save_top_k=-1, save_last=True)
    fit(tmp_path, module, guard, callbacks=[keeps, Late()])
    (event,) = guard.events
    assert "were restored to step 6" in event.done
    assert all(p.isfinite().all() for p in module.parameters())


class UnfreezesLate(BaseFinetuning):
    """Unfreezes the blocks at the beginning of the second epoch, in a group of parameters of their own."""

    def freeze_before_training(self, module):
        self.freeze(module.layers)

    def finetune_function(self, module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.layers, optimizer, lr=1e-3)


class Finetuned(Bad):
    """Has its bad loss in the second epoch."""

    def training_step(self, batch, index):
        return super().training_step(batch, index + 24 * self.current_epoch)

    def configure_optimizers(self):
        return self.optimizer([p for p in self.parameters() if p.requires_grad])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("plugins", [list, lambda: [BF16Precision(weights="masters")]], ids=["float32", "masters"])
def test_checkpoints_from_before_parameters_were_unfrozen_are_passed_over(tmp_path, plugins):
    guard = StepGuard(on_nonfinite="rollback")
    options = {"callbacks": [UnfreezesLate(), saving(tmp_path, every=5)], "plugins": plugins(), "max_epochs": 2}
    fit(tmp_path, module := Finetuned([26 + 1]), guard, **options)  # step 27; saved at 25
    assert "were restored to step 25" in guard.events[0].done
    assert all(p.isfinite().all() for p in module.parameters())
    options = {"callbacks": [UnfreezesLate(), saving(tmp_path, every=5)], "plugins": plugins(), "max_epochs": 2}
    with pytest.raises(RuntimeError, match=r"Step 24 .*other parameter groups.*just after parameters are unfrozen"):
        fit(tmp_path, Finetuned([24]), StepGuard(on_nonfinite="rollback"), **options)


@pytest.mark.filterwarnings("ignore")
def test_a_run_from_a_checkpoint_may_go_back_to_that_before_it_unfreezes(tmp_path):
    fit(tmp_path, Finetuned(), callbacks=[UnfreezesLate(), saving(tmp_path, every=26)], max_epochs=2)
    (path,) = (tmp_path / "saved").glob("*.ckpt")
    guard = StepGuard(on_nonfinite="rollback")
    callbacks = [UnfreezesLate(), saving(tmp_path, every=1000)]
    fit(tmp_path, Finetuned([27]), guard, callbacks=callbacks, ckpt_path=path, weights_only=False, max_epochs=2)
    assert "were restored to step 26" in guard.events[0].done


def test_loggers_get_the_number_of_each_kind(tmp_path):
    seen = []

    class Seen(DummyLogger):
        def log_metrics(self, metrics, step=None):
            seen.append((metrics, step))

    guard = StepGuard(warmup_steps=4)

    class Both(Bad):
        def training_step(self, batch, index):
            return super().training_step(batch, index) * (1e4 if index == 15 else 1.0)

    module = Both([3, 9])
    fit(tmp_path, module, guard, logger=Seen(), log_every_n_steps=8)
    assert [event.kind for event in guard.events] == ["nonfinite", "nonfinite", "spike"]
    assert [each for each in seen if next(iter(each[0])).startswith("guard/")] == [
        ({"guard/nonfinite": 1.0}, 3),
        ({"guard/nonfinite": 2.0}, 9),
        ({"guard/spike": 1.0}, 15),
    ]


def test_a_checkpoint_that_is_gone_is_not_taken(tmp_path):
    class Gone(Callback):
        def on_train_batch_start(self, trainer, module, batch, index):
            if index == 10:
                next((tmp_path / "saved").glob("*step=8*")).unlink()

    guard = StepGuard(on_nonfinite="rollback")
    fit(tmp_path, Bad([10]), guard, callbacks=[saving(tmp_path), Gone()])
    assert "were restored to step 4" in guard.events[0].done


def test_without_a_whole_checkpoint_the_run_ends(tmp_path):
    with pytest.raises(RuntimeError, match=r"no complete checkpoint from before that step.*use 'skip'"):
        fit(tmp_path, Bad([2]), StepGuard(on_nonfinite="rollback"), callbacks=[saving(tmp_path)])


def test_going_back_has_a_bound(tmp_path):
    with pytest.raises(RuntimeError, match=r"already rolled back 2 times.*Lower the learning rate"):
        fit(
            tmp_path,
            Bad([6, 9, 12, 15]),
            StepGuard(on_nonfinite="rollback", max_rollbacks=2),
            callbacks=[saving(tmp_path)],
        )


class StopsAtTheBadBatch(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 5:
            raise KeyError("of another callback")


def test_a_run_that_ends_amid_a_bad_step_leaves_the_optimizer_able_to_step(tmp_path):
    module = Bad([5])
    optimizer = module.configure_optimizers()
    module.configure_optimizers = lambda: optimizer
    guard = StepGuard()
    with pytest.raises(KeyError, match="of another callback"):
        fit(tmp_path, module, callbacks=[StopsAtTheBadBatch(), guard])
    before = [p.detach().clone() for p in module.parameters()]
    module.bad = set()
    fit(tmp_path, module)
    assert not any(map(torch.equal, before, module.parameters()))


def test_saves_are_followed_only_while_fit_runs(tmp_path):
    made = fit(tmp_path, Bad(), StepGuard(on_nonfinite="rollback"), callbacks=[saving(tmp_path)])
    assert "save_checkpoint" not in vars(made.strategy)


# Refusals


@pytest.mark.parametrize(
    ("settings", "cure"),
    [
        ({"on_nonfinite": "panic"}, "Use one of"),
        ({"on_spike": "panic"}, "Use one of"),
        ({"skip_on": "moon"}, "Use one of"),
        ({"window": 1}, "Use 2 or more"),
        ({"sigmas": 0.0}, "more than 0"),
        ({"max_in_a_row": 0}, "Use 1 or more"),
        ({"max_rollbacks": -1}, "Use 0 or more"),
    ],
)
def test_wrong_settings_are_refused(settings, cure):
    with pytest.raises(ValueError, match=cure):
        StepGuard(**settings)


def test_what_cannot_be_is_refused_before_the_first_step(tmp_path):
    class Manual(Bad):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

    with pytest.raises(ValueError, match="let Lightning optimize"):
        fit(tmp_path, Manual(), StepGuard())
    with pytest.raises(ValueError, match="Use fused=True"):
        fit(tmp_path, Bad(optimizer=OPTIMIZERS["plain"]), StepGuard(skip_on="device"))
    several = Bad(optimizer=lambda p: torch.optim.LBFGS(p, lr=1e-2, max_iter=2))
    with pytest.raises(ValueError, match=r"cannot skip steps of LBFGS.*Use on_nonfinite='stop'"):
        fit(tmp_path, several, StepGuard())
    fit(tmp_path, several, StepGuard(on_nonfinite="stop"))
    with pytest.raises(ValueError, match=r"Add ModelCheckpoint"):
        fit(tmp_path, Bad(), StepGuard(on_spike="rollback"))
    weights = ModelCheckpoint(dirpath=tmp_path / "weights", save_weights_only=True)
    with pytest.raises(ValueError, match="only saves weights"):
        fit(tmp_path, Bad(), StepGuard(on_spike="rollback"), callbacks=[weights])
    averaging = StochasticWeightAveraging(swa_lrs=1e-3)
    with pytest.raises(ValueError, match="which change no average"):
        fit(tmp_path, Bad(), StepGuard(on_spike="rollback"), callbacks=[saving(tmp_path), averaging], max_epochs=2)


# Several ranks


def on_two_ranks(folder, strategy, on_nonfinite, kind, gradients):
    """Let one rank alone see a bad loss, and compare with a run in which both leave that batch out."""
    import pathlib

    from lightning_ups.strategies import FSDP2Strategy

    class Once(Bad):
        def training_step(self, batch, index):
            self.factor = NAN if self.global_rank == 1 else 1.0
            return super().training_step(batch, index)

    folder = pathlib.Path(folder)

    def run(bad, data, guard=None):
        module = Once(bad, optimizer=OPTIMIZERS[kind])
        chosen = FSDP2Strategy() if strategy == "fsdp2" else strategy
        callbacks = [saving(folder / str(len(bad)))] if on_nonfinite == "rollback" and guard else []
        fit(
            folder,
            module,
            guard,
            data=data,
            callbacks=callbacks,
            devices=2,
            strategy=chosen,
            use_distributed_sampler=False,
        )
        whole = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in module.parameters())
        return [p.detach().clone() for p in whole]

    guard = StepGuard(on_nonfinite=on_nonfinite, gradients=gradients)
    guarded = run([10], batches(), guard)
    left_out = [10] if on_nonfinite == "skip" else [8, 9, 10]
    without = run([], batches(without=left_out))
    assert all(map(torch.equal, guarded, without))
    assert len(guard.events) == 1
    return guard._on_device


@pytest.mark.parametrize(
    ("on_nonfinite", "kind", "gradients"),
    [("skip", "fused", True), ("skip", "plain", False), ("rollback", "fused", False)],
)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_all_ranks_agree(ranks, tmp_path, strategy, on_nonfinite, kind, gradients):
    """Without gradients, which the ranks have reduced, only one rank's loss tells."""
    on_device = ranks(on_two_ranks, str(tmp_path), strategy, on_nonfinite, kind, gradients)
    assert on_device == (kind == "fused")
