import copy
import random

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import BackboneFinetuning, EMAWeightAveraging, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader

from lightning_ups.callbacks import Compile
from lightning_ups.order import applied
from lightning_ups.transforms.compile import Contest
from tests import backends
from tests.toys import trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning"),
]
WAY = "with the step compiled"
STEPS = 36  # until the ways are compared, and some more


@pytest.fixture(autouse=True)
def wins(monkeypatch):
    backends.register()
    torch.compiler.reset()
    monkeypatch.setattr(Contest, "_fastest", lambda contest: WAY if WAY in contest._times else contest._usual)


def scores(x):
    """Compute what no module does."""
    for shift in range(6):
        x = (x + shift).tanh() * x.sigmoid()
    return x.square()


class Outside(LightningModule):
    """Computes nearly all in its step."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.backbone, self.head = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))
        self.losses, self.results, self.evaluated, self.last = [], [], [], None

    def loss(self, x):
        return scores(self.head(self.backbone(x)) * self.scale).mean()

    def training_step(self, batch, index):
        return self.loss(batch)

    def on_train_batch_end(self, outputs, batch, index):
        self.losses.append(outputs["loss"].item())

    def validation_step(self, batch, index):
        self.evaluated.append(self.loss(batch).item())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def rows(count=STEPS * 4):
    return DataLoader(torch.randn(count, 4, generator=torch.Generator().manual_seed(3)), batch_size=4)


class Watch(Callback):
    """Keeps the lines of the report."""

    def __init__(self):
        self.lines, self.compiled = [], []

    def on_train_batch_end(self, trainer, module, *_):
        context = applied(trainer.strategy)
        self.lines = [] if context is None else [*context.report.parts["Compile"]["lines"]]
        step = vars(module).get("training_step")
        self.compiled.append(step is not None and step.is_on)

    @property
    def why(self):
        said = [line for line in self.lines if "training_step" in line]
        return said[-1] if said else ""


def fit(
    tmp_path, module, *, compiles=True, backend="ups_aot_as_it_is", callbacks=(), data=None, resume=None, **options
):
    """Return what a run leaves behind, and what watched it."""
    random.seed(5)
    torch.manual_seed(5)
    ours = [Compile(scope="auto", training_step=True, mode="auto", backend=backend)] if compiles else []
    options = {"epochs": 1, "limit_val_batches": 0, **options}
    watch = Watch()
    lightning = trainer(tmp_path, callbacks=[*ours, *callbacks, watch], **options)
    lightning.fit(module, data or rows(), rows(8), ckpt_path=resume)
    left = {
        "losses": getattr(module, "losses", None),
        "evaluated": module.evaluated,
        "results": [value.tolist() for value in module.results],
        "state": {name: value.tolist() for name, value in module.state_dict().items()},
        "random": (torch.get_rng_state().tolist(), random.random()),
        "logged": {name: value.item() for name, value in lightning.callback_metrics.items()},
    }
    assert "training_step" not in vars(module)
    assert not torch.is_inference_mode_enabled()
    return left, watch


class Logs(Outside):
    def training_step(self, batch, index):
        outputs = scores(self.head(self.backbone(batch)))
        loss = outputs.mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log_dict({"largest": outputs.max()})
        self.last = outputs.detach()
        return {"loss": loss, "outputs": outputs.detach()}

    def on_train_batch_end(self, outputs, batch, index):
        super().on_train_batch_end(outputs, batch, index)
        self.results += [outputs["outputs"], self.last]


class ConfiguresModel(Outside):
    def __init__(self):
        super().__init__()
        self.backbone = self.head = None

    def configure_model(self):
        torch.manual_seed(0)
        self.backbone, self.head = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 4)


@pytest.mark.parametrize("kind", [Outside, Logs, ConfiguresModel])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_whose_work_is_outside_of_modules_is_compiled_and_gives_the_same(tmp_path, kind, accumulate):
    options = {"accumulate_grad_batches": accumulate, "data": rows(STEPS * 4 * accumulate)}
    options |= {"limit_val_batches": 1.0, "val_check_interval": 9}
    expected, _ = fit(tmp_path, kind(), compiles=False, **options)
    actual, watch = fit(tmp_path, kind(), **options)
    assert watch.compiled[-1]
    assert "compiled as a whole, since a step takes" in watch.why
    assert actual == expected


def test_inductor_gives_nearly_the_same(tmp_path):
    expected, _ = fit(tmp_path, Outside(), compiles=False)
    actual, watch = fit(tmp_path, Outside(), backend="inductor")
    assert watch.compiled[-1]
    torch.testing.assert_close(actual["losses"], expected["losses"], rtol=1e-4, atol=1e-5)


def test_callbacks_act_as_without_it(tmp_path):
    def run(where, **options):
        callbacks = [LearningRateMonitor("step"), EMAWeightAveraging(), ModelCheckpoint(where, save_last=True)]
        more = {"callbacks": callbacks, "logger": CSVLogger(where), "enable_checkpointing": True}
        return fit(where, Outside(), **more, **options)

    expected, _ = run(tmp_path / "a", compiles=False)
    actual, watch = run(tmp_path / "b")
    assert watch.compiled[-1]
    assert actual == expected
    expected, _ = fit(tmp_path, Outside(), compiles=False, epochs=2, resume=tmp_path / "a" / "last.ckpt")
    actual, watch = fit(tmp_path, Outside(), epochs=2, resume=tmp_path / "b" / "last.ckpt")
    assert watch.compiled[-1]
    assert actual == expected


class Finetuned(Outside):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.head.parameters(), lr=1e-2)


def test_an_unfrozen_backbone_trains(tmp_path):
    options = {"epochs": 2}
    expected, _ = fit(
        tmp_path, Finetuned(), compiles=False, callbacks=[BackboneFinetuning(unfreeze_backbone_at_epoch=1)], **options
    )
    actual, watch = fit(tmp_path, Finetuned(), callbacks=[BackboneFinetuning(unfreeze_backbone_at_epoch=1)], **options)
    assert watch.compiled[-1]
    assert actual == expected


class Inside(Outside):
    def training_step(self, batch, index):
        return self.head(batch).square().mean()


def test_a_step_that_does_little_itself_is_left_alone(tmp_path):
    _, watch = fit(tmp_path, Inside())
    assert not any(watch.compiled)
    assert watch.why == ""


class ByHand(Outside):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, index):
        loss = self.loss(batch)
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()


def test_manual_optimization_is_left_alone(tmp_path):
    ByHand.on_train_batch_end = lambda *_: None
    _, watch = fit(tmp_path, ByHand())
    assert not any(watch.compiled)


class WritesPastAutograd(Outside):
    def training_step(self, batch, index):
        self.head.weight.data.mul_(0.99)
        return self.loss(batch)


class Averages(nn.Module):
    """Hides the write from whoever reads the step."""

    def __init__(self):
        super().__init__()
        self.average = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        self.average.data.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x * self.weight + self.average


class WritesInModule(Outside):
    def __init__(self):
        super().__init__()
        self.averages = nn.ModuleList([Averages()])

    def training_step(self, batch, index):
        for average in self.averages:
            batch = average(batch)
        return self.loss(batch)


class AttentionDrops(Outside):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 1, dropout=0.5)

    def training_step(self, batch, index):
        return self.loss(self.attention(batch, batch, batch, need_weights=False)[0])


class AttentionDropsInStep(Outside):
    def training_step(self, batch, index):
        x = batch[None, None]
        return self.loss(nn.functional.scaled_dot_product_attention(x, x, x, None, 0.5)[0, 0])


class Draws(Outside):
    def training_step(self, batch, index):
        return self.loss(batch + torch.randn_like(batch))


class InfersInStep(Outside):
    def training_step(self, batch, index):
        with torch.inference_mode():
            aside = self.head(batch)
        self.results.append(aside)
        return self.loss(batch)


class Infers(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        with torch.inference_mode():
            x.mean().item()
        return x * self.weight


class InfersInModule(Outside):
    def __init__(self):
        super().__init__()
        self.infers = Infers()

    def training_step(self, batch, index):
        return self.loss(self.infers(batch))


COUNT = 0


class Counts(Outside):
    def training_step(self, batch, index):
        global COUNT
        COUNT += 1
        return self.loss(batch)


class Fetches(Outside):
    def training_step(self, batch, index):
        loss = self.loss(batch)
        return loss * (1 + 0 * loss.item())


class DrawsInPython(Outside):
    def training_step(self, batch, index):
        return self.loss(batch * random.random())


BREAKING = [
    WritesPastAutograd,
    WritesInModule,
    AttentionDrops,
    AttentionDropsInStep,
    Draws,
    InfersInStep,
    InfersInModule,
]
BREAKING += [Counts, Fetches, DrawsInPython]


@pytest.mark.parametrize("backend", ["ups_aot_as_it_is", "inductor"])
@pytest.mark.parametrize("kind", BREAKING)
def test_what_compiled_code_might_do_otherwise_runs_uncompiled(tmp_path, kind, backend):
    expected, _ = fit(tmp_path, kind(), compiles=False)
    actual, watch = fit(tmp_path, kind(), backend=backend)
    assert not watch.compiled[-1]
    assert "not compiled as a whole" in watch.why
    torch.testing.assert_close(actual, expected)


class AddsHook(Callback):
    """Adds a hook when the step is compiled already."""

    def __init__(self, add):
        self.add, self.calls = add, []

    def on_train_batch_start(self, trainer, module, batch, index):
        if index == STEPS - 3:
            self.add(module, self.calls)


def on_forward(module, calls):
    module.head.register_forward_hook(lambda _, args, out: calls.append(1) or out * 2)


def before_forward(module, calls):
    module.head.register_forward_pre_hook(lambda _, args: calls.append(1) or (args[0] * 2,))


def on_backward(module, calls):
    module.head.register_full_backward_hook(lambda _, inputs, outputs: calls.append(1) or (inputs[0] * 2,))


def on_parameter(module, calls):
    module.head.weight.register_hook(lambda grad: calls.append(1) or grad * 2)


@pytest.mark.parametrize("add", [on_forward, before_forward, on_backward, on_parameter])
def test_hooks_that_are_added_later_act(tmp_path, add):
    hooking = AddsHook(add)
    expected, _ = fit(tmp_path, Outside(), compiles=False, callbacks=[hooking])
    calls = hooking.calls.copy()
    hooking.calls.clear()
    actual, watch = fit(tmp_path, Outside(), callbacks=[hooking])
    assert watch.compiled[STEPS - 4]
    assert hooking.calls == calls == [1, 1, 1]
    assert actual == expected


def test_hooks_that_are_there_keep_it_from_being_compiled(tmp_path):
    module = Outside()
    module.head.register_forward_hook(lambda *_: None)
    _, watch = fit(tmp_path, module)
    assert watch.why.endswith("hooks are registered")


REFUSING = ["forward_refused", "backward_refused", "forward_dies", "backward_dies", "silently_dies"]


@pytest.mark.parametrize("backend", REFUSING)
def test_a_compiler_that_fails_harms_nothing(tmp_path, monkeypatch, backend):
    monkeypatch.setattr("lightning_ups.transforms.compile.frame.is_small", lambda graph: True)
    expected, _ = fit(tmp_path, Logs(), compiles=False)
    actual, watch = fit(tmp_path, Logs(), backend=f"ups_{backend}")
    assert not watch.compiled[-1]
    assert "not compiled as a whole" in watch.why
    assert actual == expected


class Varies(Outside):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def on_train_batch_start(self, batch, index):
        self.calls = index

    def training_step(self, batch, index):
        return self.loss(batch) * (1.0 if self.calls < 0 else 1.0 + self.calls)


def test_a_step_that_is_compiled_over_and_over_is_left(tmp_path, monkeypatch):
    expected, _ = fit(tmp_path, Varies(), compiles=False)
    actual, watch = fit(tmp_path, Varies())
    assert not watch.compiled[-1]
    assert "over and over" in watch.why
    assert actual == expected


class Copies(Outside):
    def on_train_batch_end(self, outputs, batch, index):
        super().on_train_batch_end(outputs, batch, index)
        if index == STEPS - 2:
            assert vars(self)["training_step"].is_on
            self.copied = copy.deepcopy(self)


def test_a_copy_has_a_step_of_its_own(tmp_path):
    module = Copies()
    fit(tmp_path, module)
    copied = module.copied
    assert copied.training_step.__func__ is Copies.training_step
    assert copied.training_step.__self__ is copied
