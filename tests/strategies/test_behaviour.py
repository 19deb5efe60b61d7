"""What a user of FSDP2Strategy meets beside the losses: evaluation, callbacks, errors, precision, offload."""

import copy
import signal
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import BaseFinetuning, EMAWeightAveraging, StochasticWeightAveraging
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_ups.callbacks import Compile
from lightning_ups.order import applied
from lightning_ups.precision import BF16Precision
from lightning_ups.strategies import FSDP2Strategy, SimpleFSDPStrategy
from lightning_ups.transforms.sharding import unsharded
from tests.strategies import cases
from tests.strategies.cases import (
    CASES,
    WIDTH,
    Block,
    Case,
    data,
    losses_of,
    on_ranks,
    simply_on_ranks,
    train,
    two_ranks,
    weights_of,
    whole,
)
from tests.strategies.test_parity import check, expected
from tests.toys import trainer


def loader(size=8):
    return DataLoader(data(), batch_size=size)


KINDS = [FSDP2Strategy, pytest.param(SimpleFSDPStrategy, marks=pytest.mark.slow)]


def made(tmp_path, *, name="Case", kind=FSDP2Strategy, strategy=None, callbacks=(), **options):
    """Return a case and its Trainer: by a strategy on ranks, or on one device."""
    warnings.simplefilter("ignore")
    seed_everything(3, verbose=False)
    if not dist.is_initialized():
        return CASES[name](), trainer(tmp_path, callbacks=callbacks, **options)
    if kind is SimpleFSDPStrategy:
        callbacks = [*callbacks, Compile(backend="aot_eager")]
    strategy = kind(**(strategy or {}))
    return CASES[name](), trainer(tmp_path, strategy=strategy, devices=2, callbacks=callbacks, **options)


def evaluated_first(tmp_path, kind):
    with pytest.MonkeyPatch.context() as patch:
        # Lightning avoids inference mode where it reads "gloo", so that CPU tests would not see what GPUs do.
        namespace = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True, get_backend=lambda: "nccl")
        patch.setattr("lightning.pytorch.loops.utilities.dist", namespace)
        model, lightning = made(tmp_path, kind=kind)
        modes = []
        model.on_validation_start = lambda: modes.append(torch.is_inference_mode_enabled())
        lightning.validate(model, loader(), verbose=False)
        before = lightning.callback_metrics["val_loss"].item()
        left = unsharded(model)
        lightning.fit(model, loader())
        lightning.validate(model, loader(), verbose=False)
        predictions = lightning.predict(model, loader(5))  # the last batch is smaller
        inference = [loop.inference_mode for loop in (lightning.validate_loop, lightning.predict_loop)]
        return losses_of(model, 5), before, left, modes, [len(p) for p in predictions], inference


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_before_and_after_fit(ranks, tmp_path, kind):
    losses, before, left, modes, sizes, inference = ranks(evaluated_first, tmp_path, kind)
    right = expected("Case", tmp_path, {})["losses"]
    assert losses == pytest.approx(right, rel=1e-5)
    assert before == pytest.approx(right[0], rel=1e-5)
    assert left == []
    assert modes == [False, False]
    assert sizes == [5, 3]
    assert inference == [True, True]  # the user's own again


def validated_within(tmp_path, every):
    model, lightning = made(tmp_path, epochs=5, accumulate_grad_batches=4, val_check_interval=every)
    lightning.fit(model, loader(2), loader(3))
    return {"losses": losses_of(model, 5), "weights": weights_of(model)}


@pytest.mark.parametrize("every", [1, 3])
def test_validation_within_an_accumulation_changes_nothing(ranks, tmp_path, every):
    check(ranks(validated_within, tmp_path, every), expected("Case", tmp_path, {"accumulate": 4}))


def after_an_exception(tmp_path, kind):
    model, lightning = made(tmp_path, kind=kind)
    run, seen = model.layers[1].up.forward, []

    def fail(x):
        if not seen:
            seen.append(None)
            raise RuntimeError("stop here")
        return run(x)

    model.layers[1].up.forward = fail
    with pytest.raises(RuntimeError, match="stop here"):
        lightning.fit(model, loader())
    model.losses.clear()
    made(tmp_path, kind=kind)[1].fit(model, loader())
    return losses_of(model, 5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_fit_after_an_exception_within_a_forward(ranks, tmp_path, kind):
    losses = ranks(after_an_exception, tmp_path, kind)
    assert losses == pytest.approx(expected("Case", tmp_path, {})["losses"], rel=1e-5)


OUTSIDE = {
    "numpy": lambda module: module.head.weight.detach().cpu().numpy(),
    "format": lambda module: f"{module.head.weight.norm():.3f}",
    "copy": lambda module: module.head.weight.data.copy_(torch.ones(module.head.weight.shape)),
    "deepcopy": lambda module: copy.deepcopy(module.layers[0]),
    "other": lambda _: 1 / 0,
}


WHERE = [*((what, FSDP2Strategy) for what in OUTSIDE), ("numpy", SimpleFSDPStrategy)]


@two_ranks
@pytest.mark.parametrize(("what", "kind"), WHERE)
def test_an_error_outside_of_a_step_that_shards_cause_has_a_hint(tmp_path, what, kind):
    model, lightning = made(tmp_path, kind=kind)
    model.on_train_start = lambda: OUTSIDE[what](model)
    with pytest.raises((RuntimeError, TypeError, AssertionError, ZeroDivisionError)) as failed:
        lightning.fit(model, loader())
    notes = getattr(failed.value, "__notes__", [])
    if what == "other":
        assert notes == []
        return
    (note,) = notes
    assert note.startswith(f"Under {kind.__name__}, parameters and gradients are shards (DTensor) outside of a step")
    assert "tensor.full_tensor()" in note


@two_ranks
@pytest.mark.parametrize(
    ("options", "root"),
    [({"precision": "bf16-mixed"}, torch.bfloat16), ({"plugins": [BF16Precision(weights="masters")]}, torch.float32)],
    ids=["autocast", "pure"],
)
def test_bf16_computes_in_blocks_and_gives_float32_gradients(tmp_path, options, root):
    model, lightning = made(tmp_path, name="Case", epochs=1, **options)
    seen = {}
    model.layers[0].up.register_forward_hook(lambda m, _, out: seen.update(weight=m.weight.dtype, inside=out.dtype))
    # Registered after FSDP2's own, whose last act is to cast.
    model.on_train_start = lambda: model.head.register_forward_hook(lambda m, _, out: seen.update(root=out.dtype))
    model.on_before_optimizer_step = lambda *_: seen.update(gradient=model.head.weight.grad.dtype)
    lightning.fit(model, loader())
    half, full = torch.bfloat16, torch.float32
    assert seen == {"weight": half, "inside": half, "root": root, "gradient": full}
    assert model.losses[0].dtype is model.head.weight.dtype is full


def normed(tmp_path, strategy):
    made_ = FSDP2Strategy(**strategy) if isinstance(strategy, dict) else strategy
    model, _, result = train("Normed", tmp_path, strategy=made_, ranks=2, accumulate=2)
    return result, {name: b.clone() for name, b in model.named_buffers()}


def test_buffers_are_those_of_ddp(ranks, tmp_path):
    (ours, mine), (ddp, theirs) = ranks(normed, tmp_path, {}), ranks(normed, tmp_path, "ddp")
    check(ours, ddp)
    for name, buffer in theirs.items():
        torch.testing.assert_close(mine[name], buffer, msg=name)


def normed_and_averaged(tmp_path, strategy):
    warnings.simplefilter("ignore")
    seed_everything(3, verbose=False)
    model, average = CASES["Normed"](), EMAWeightAveraging(decay=0.5)
    run = trainer(tmp_path, strategy=strategy or FSDP2Strategy(), devices=2, epochs=3, callbacks=[average])
    run.fit(model, loader(4), loader(4))
    found = [None] * 2
    dist.all_gather_object(found, {name: buffer.tolist() for name, buffer in model.named_buffers()})
    return found, run.callback_metrics["val_loss"].item()


@pytest.mark.filterwarnings("ignore")
def test_averaged_buffers_are_those_of_ddp(ranks, tmp_path):
    (ours, loss), (ddp, right) = (ranks(normed_and_averaged, tmp_path, strategy) for strategy in (None, "ddp"))
    assert loss == pytest.approx(right, rel=1e-5)
    for mine, theirs in zip(ours, ddp, strict=True):
        for name, buffer in theirs.items():
            assert mine[name] == pytest.approx(buffer, rel=1e-4), name


@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.1, "accumulate": 2}], ids=repr)
def test_offload(ranks, tmp_path, options):
    check(ranks(on_ranks, "Scalar", tmp_path, {"offload": True}, 2, options), expected("Scalar", tmp_path, options))


class Unfreeze(BaseFinetuning):
    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.layers)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 2:
            self.unfreeze_and_add_param_group(pl_module.layers, optimizer, lr=0.01)


CALLBACKS = {
    "average": lambda: EMAWeightAveraging(decay=0.5),
    "swa": lambda: StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=2),
    "unfreeze": Unfreeze,
}


def with_callback(tmp_path, name, kind):
    model, lightning = made(tmp_path, kind=kind, callbacks=[CALLBACKS[name]()])
    lightning.fit(model, loader(8 if dist.is_initialized() else 16), loader(8))
    return {"losses": losses_of(model, 5), "weights": weights_of(model)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CALLBACKS)
@pytest.mark.filterwarnings("ignore")
def test_callbacks_that_touch_weights(ranks, tmp_path, name, kind):
    if (name, kind) == ("swa", SimpleFSDPStrategy):
        pytest.skip("not tried")
    check(ranks(with_callback, tmp_path, name, kind), with_callback(tmp_path, name, kind))


class Clamps(cases.Case):
    """Bounds its weights after each step, as critics do."""

    def on_train_batch_end(self, *_):
        for parameter in self.layers.parameters():
            parameter.data = parameter.data.clamp(-0.05, 0.05)
        self.layers[0].up.weight.data[3] = 0


class Forgets(cases.Case):
    """Zeroes a row through what an index gives."""

    def on_train_batch_end(self, *_):
        self.layers[0].up.weight.data[3].zero_()


def clamping(tmp_path):
    CASES["Clamps"] = Clamps
    model, lightning = made(tmp_path, name="Clamps")
    lightning.fit(model, loader(8 if dist.is_initialized() else 16))
    return {"losses": losses_of(model, 5), "weights": weights_of(model)}


def test_data_that_is_set_between_steps_is_kept(ranks, tmp_path):
    found, right = ranks(clamping, tmp_path), clamping(tmp_path)
    clamped = [value for name, value in right["weights"].items() if "layers" in name]
    assert clamped
    assert max(value.abs().max().item() for value in clamped) < 0.0501
    assert not right["weights"]["layers.0.up.weight"][3].any()
    check(found, right)


@two_ranks
@pytest.mark.parametrize(("run", "steps"), [(simply_on_ranks, 2), (on_ranks, 2), (on_ranks, 1)])
def test_a_write_that_would_be_lost_between_steps_is_refused(tmp_path, run, steps):
    CASES["Forgets"] = Forgets
    with pytest.raises(RuntimeError, match=r"shape \(32, 8\).*would be lost.*weight\[0\] = 0"):
        run("Forgets", tmp_path, {}, 2, {"steps": steps})


@two_ranks
def test_a_copy_of_a_sharded_module_is_refused_with_the_cure(tmp_path):
    model, lightning = made(tmp_path, epochs=1)
    lightning.fit(model, loader())
    with pytest.raises(ValueError, match=r"Case is sharded and cannot be copied.*create a new module"):
        made(tmp_path, epochs=1, callbacks=[EMAWeightAveraging()])[1].fit(model, loader())


class Terminate(Callback):
    def __init__(self):
        self.stopped = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == 3 and trainer.global_rank == 1:
            signal.raise_signal(signal.SIGTERM)

    def on_exception(self, trainer, pl_module, exception):
        self.stopped.append((trainer.global_step, type(exception)))


@two_ranks
def test_all_ranks_stop_together_when_one_gets_sigterm(tmp_path):
    watch, stopped = Terminate(), [None] * 2
    model, lightning = made(tmp_path, epochs=50, callbacks=[watch], strategy={"sigterm_every": 2})
    with pytest.raises(SIGTERMException):
        lightning.fit(model, loader())
    dist.all_gather_object(stopped, watch.stopped)
    assert stopped[0] == stopped[1]
    (step, kind), *_ = stopped[0]
    assert step in range(4, 9)
    assert kind is SIGTERMException


@two_ranks
def test_what_is_read_outside_is_reported(tmp_path):
    model, lightning = made(tmp_path, name="ReadOutside", epochs=1)
    notes = []
    model.on_train_batch_end = lambda *_: notes.append(applied(lightning.strategy).report.parts["FSDP2Strategy"])
    lightning.fit(model, loader())
    assert notes[0]["gathered_for_the_step"] == ["embed.weight", "layers.0.up.weight"]


@two_ranks
def test_a_read_in_another_type_says_where_to_cast(tmp_path):
    with pytest.raises(RuntimeError, match=r"embed.weight is read outside.*Cast the input there, as in F.linear"):
        on_ranks("ReadOutside", tmp_path, {}, 2, {"plugins": [BF16Precision(weights="masters")]})


def named(tmp_path):
    model, lightning = made(tmp_path, name="ReadOutside", strategy={"outside": ["embed.weight", "layers.0.up.weight"]})
    lightning.fit(model, loader())
    return losses_of(model, 5), sorted(model.state_dict())


def test_what_is_read_outside_may_be_named(ranks, tmp_path):
    losses, keys = ranks(named, tmp_path)
    right = expected("ReadOutside", tmp_path, {})
    assert losses == pytest.approx(right["losses"], rel=1e-5)
    assert keys == sorted(right["weights"])


class Averaging(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return self.linear(x - self.mean)


class Late(cases.Case):
    def build(self):
        super().build()
        self.late = Averaging()

    def run(self, x):
        return super().run(self.late(x) if len(self.losses) > 1 else x)


def means_seen(tmp_path, strategy):
    warnings.simplefilter("ignore")
    model, means = Late(), []
    model.late.register_forward_pre_hook(lambda *_: means.append(model.late.mean.clone()))
    strategy = FSDP2Strategy() if strategy == "fsdp2" else strategy
    trainer(tmp_path, strategy=strategy, devices=2).fit(model, loader(2))
    every = [None] * 2
    dist.all_gather_object(every, torch.stack(means))
    return every


def test_a_buffer_of_a_class_that_first_runs_in_a_later_step_is_the_first_ranks(ranks, tmp_path):
    (ours, other), (ddp, _) = (
        ranks(means_seen, tmp_path, name) for name in ("fsdp2", "ddp_find_unused_parameters_true")
    )
    assert torch.equal(ours, other)
    torch.testing.assert_close(ours, ddp)


class Assigning(Case):
    automatic_optimization = False

    def training_step(self, batch, _):
        parameters = [*self.parameters()]
        gradients = torch.autograd.grad(self.loss(batch), parameters)
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient
        self.optimizers().step()


@two_ranks
def test_assigned_gradients_have_an_error_with_a_cure(tmp_path):
    with pytest.raises(RuntimeError, match=r"SGD .* whose gradients were assigned.*manual_backward"):
        trainer(tmp_path, strategy=FSDP2Strategy(), devices=2).fit(Assigning(), loader())


def norm_logged(tmp_path, kind):
    model, lightning = made(tmp_path, kind=kind, epochs=1, gradient_clip_val=0.1)
    lightning.fit(model, loader())
    return lightning.callback_metrics["grad_norm"].item()


@pytest.mark.parametrize("kind", KINDS)
def test_the_norm_before_clipping_is_logged(ranks, tmp_path, kind):
    whole_model = CASES["Case"]()
    whole_model.loss(data()).backward()
    expected_norm = torch.nn.utils.get_total_norm([p.grad for p in whole_model.parameters()]).item()
    assert ranks(norm_logged, tmp_path, kind) == pytest.approx(expected_norm, rel=1e-5)
    assert expected_norm > 0.1


class Dropping(Case):
    """Random where what it drops from is whole on every rank, and where it is split."""

    def build(self):
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)

    def run(self, x):
        x = nn.functional.dropout(self.first(x), 0.5, training=self.training)
        for layer in self.layers:
            x = x + nn.functional.dropout(layer(x), 0.5, training=self.training)
        return self.head(x)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.002)


SPLIT = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}


@two_ranks
def test_ranks_that_split_products_stay_alike_without_a_seed(tmp_path):
    warnings.simplefilter("ignore")
    model, samples = Dropping(), data()
    torch.manual_seed(dist.get_rank())
    for p in model.parameters():
        nn.init.normal_(p, std=0.1)
    strategy = FSDP2Strategy(tensor_parallel_size=2, tensor_parallel_plan=SPLIT)
    trainer(tmp_path, strategy=strategy, devices=2, epochs=2).fit(model, DataLoader(samples, batch_size=4))
    own = torch.cat([whole(p).detach().flatten() for p in model.parameters()] + [torch.stack(model.losses)])
    first, second = found = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(found, own)
    assert torch.equal(first, second)


@two_ranks
@pytest.mark.parametrize("step", ["training", "validation"])
def test_ranks_that_split_products_refuse_different_batches(tmp_path, step):
    warnings.simplefilter("ignore")
    own = DataLoader(data(), batch_size=4, sampler=DistributedSampler(data(), 2, dist.get_rank(), shuffle=False))
    shared = DataLoader(data(), batch_size=4)
    strategy = FSDP2Strategy(tensor_parallel_size=2, tensor_parallel_plan=SPLIT)
    run = trainer(tmp_path, strategy=strategy, devices=2, use_distributed_sampler=False)
    with pytest.raises(ValueError, match="Ranks 0 and 1 were given different batches"):
        run.fit(Case(), own) if step == "training" else run.fit(Case(), shared, own)
