"""A step that is captured and replayed trains as the stock step does, and what a replay cannot repeat is an error."""

import random
import sys

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ups.callbacks import (
    AccelerationFlags,
    Compile,
    DevicePrefetch,
    ExactResume,
    StepGraph,
    StepGuard,
    TokenThroughput,
)
from lightning_ups.precision import BF16Precision
from lightning_ups.transforms.step_graph import EmulatedGraph

pytestmark = pytest.mark.filterwarnings("ignore:(?!StepGraph)")
MOST_CALLS = 190  # for four values that are logged, three of them over the epoch
QUIET = dict.fromkeys(("enable_progress_bar", "enable_model_summary"), False)


class Net(LightningModule):
    """Uses dropout, a norm with buffers, two parameter groups, a schedule, and logs in several ways."""

    def __init__(self, optimizer="adamw", **options):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(0.25), nn.GELU(), nn.Linear(16, 1))
        self.kind, self.options = optimizer, options

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = (self.net(x) - y).square().mean()
        self.log("loss", loss, prog_bar=True)
        self.log_dict({"double": 2 * loss, "mean": loss.detach()}, on_step=True, on_epoch=True)
        self.log("most", loss, on_step=False, on_epoch=True, reduce_fx="max")
        return {"loss": loss, "found": x.sum()}

    def validation_step(self, batch, batch_idx):
        self.log("val", self.net(batch[0]).square().mean())

    def configure_optimizers(self):
        groups = [{"params": self.net[0].parameters(), "lr": 3e-3}, {"params": [*self.net[1:].parameters()]}]
        optimizers = {
            "adamw": lambda: torch.optim.AdamW(groups, lr=1e-2, **{"fused": True, **self.options}),
            "sgd": lambda: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, fused=True),
            "rmsprop": lambda: torch.optim.RMSprop(groups, lr=1e-3),
        }
        optimizer = optimizers[self.kind]()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def loader(rows=40, size=4, **options):
    torch.manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(rows, 4), torch.randn(rows, 1)), batch_size=size, **options)


class Seen(Callback):
    """Keeps what callbacks see after each batch."""

    def __init__(self):
        self.outputs, self.metrics, self.gradients, self.steps = [], [], [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.outputs.append(outputs)
        self.metrics.append({name: value.clone() for name, value in trainer.callback_metrics.items()})
        self.gradients.append([None if p.grad is None else p.grad.clone() for p in pl_module.parameters()])
        self.steps.append(trainer.global_step)


def fit(tmp_path, module, *callbacks, data=None, val=None, ckpt_path=None, **options):
    torch.manual_seed(2)
    seen = Seen()
    quiet = {"logger": False, "enable_checkpointing": False, "num_sanity_val_steps": 0, **QUIET}
    options = {"accelerator": "cpu", "max_epochs": 3, **quiet, **options}
    trainer = Trainer(callbacks=[*callbacks, seen], default_root_dir=tmp_path, **options)
    trainer.fit(module, data or loader(), val, ckpt_path=ckpt_path)
    return trainer, seen


def check_equal(one, other):
    assert [*one] == [*other]
    for name, value in one.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, other[name]), name
        elif isinstance(value, dict):
            check_equal(value, other[name])
        elif isinstance(value, list):
            check_equal(dict(enumerate(value)), dict(enumerate(other[name])))
        else:
            assert (type(value), value) == (type(other[name]), other[name]), name


def check_same(tmp_path, make=Net, *, more=tuple, graph=None, **options):
    """Train twice, and compare all that a run leaves; return the callback."""
    graph = graph or StepGraph(emulate=True)
    runs = []
    for callbacks in ([], [graph]):
        module = make()
        trainer, seen = fit(tmp_path, module, *callbacks, *more(), **options)
        runs.append((trainer, seen, module))
    (stock, seen, module), (ours, also, other) = runs
    check_equal(module.state_dict(), other.state_dict())
    for name in ("outputs", "metrics", "gradients", "steps"):
        check_equal(dict(enumerate(getattr(seen, name))), dict(enumerate(getattr(also, name))))
    check_equal(stock.optimizers[0].state_dict(), ours.optimizers[0].state_dict())
    check_equal(stock.fit_loop.state_dict(), ours.fit_loop.state_dict())
    assert "run" not in vars(ours.fit_loop.epoch_loop.automatic_optimization), "the loop is as it was"
    return graph


def lines(caplog):
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith("StepGraph:")]


@pytest.fixture(autouse=True)
def logged(caplog):
    caplog.set_level("INFO", logger="lightning.pytorch")


CASES = {
    "plain": {},
    "sgd": {"make": lambda: Net("sgd")},
    "clipped by norm": {"gradient_clip_val": 0.1},
    "clipped by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "accumulated": {"accumulate_grad_batches": 3, "max_epochs": 6},
    "accumulated and clipped": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    "bf16": {"precision": "bf16-mixed"},
    "validated": {"val_check_interval": 3, "val": True},
    "averaged": {"more": lambda: [EMAWeightAveraging(decay=0.9)], "val": True},
    "measured and prefetched": {"more": lambda: [AccelerationFlags(), TokenThroughput(table=False), DevicePrefetch()]},
}


@pytest.mark.parametrize("case", CASES)
def test_a_replayed_step_trains_as_the_stock_step(case, tmp_path, caplog):
    options = dict(CASES[case])
    options["val"] = loader() if options.get("val") else None
    check_same(tmp_path, **options)
    assert "StepGraph: the step is one emulated graph" in lines(caplog)


@pytest.mark.parametrize("make", [lambda: Net(fused=None), lambda: Net("rmsprop")], ids=["adamw", "rmsprop"])
@pytest.mark.parametrize("accumulated", [1, 2])
def test_an_optimizer_that_is_not_fused_steps_outside(tmp_path, caplog, make, accumulated):
    check_same(tmp_path, make, accumulate_grad_batches=accumulated, gradient_clip_val=0.1)
    assert any("steps outside of it" in line for line in lines(caplog))


class Clips(Net):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        torch.nn.utils.clip_grad_norm_(self.net[0].parameters(), 0.1)


def test_hooks_before_the_step_run_on_the_host(tmp_path, caplog):
    check_same(tmp_path, Clips)
    assert any("Clips.configure_gradient_clipping runs before its step" in line for line in lines(caplog))


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("shapes", [1, 2])
def test_a_batch_of_another_shape_runs_without_the_graph(tmp_path, caplog, shapes, accumulated):
    data = loader(rows=18)
    graph = StepGraph(emulate=True, shapes=shapes)
    check_same(tmp_path, graph=graph, data=data, max_epochs=6, accumulate_grad_batches=accumulated)
    others = [line for line in lines(caplog) if "another shape" in line]
    captured = [line for line in lines(caplog) if "one emulated graph" in line]
    assert len(others) == 1
    assert "[2, 4] and [4, 4]" in others[0]
    assert len(captured) == shapes


def test_loggers_get_the_same_rows(tmp_path):
    for name, callbacks in (("stock", []), ("graph", [StepGraph(emulate=True)])):
        logger = CSVLogger(tmp_path, name=name, version=0)
        fit(tmp_path, Net(), *callbacks, LearningRateMonitor(), logger=logger, log_every_n_steps=1)
    stock, graph = ((tmp_path / name / "version_0/metrics.csv").read_text() for name in ("stock", "graph"))
    assert stock == graph
    assert "lr-AdamW/pg1" in stock


@pytest.mark.parametrize("resumes", [False, True], ids=["at once", "resumed"])
def test_checkpoints_are_those_of_a_stock_run(tmp_path, resumes):
    found = []
    for name, callbacks in (("stock", lambda: []), ("graph", lambda: [StepGraph(emulate=True)])):
        save = ModelCheckpoint(tmp_path / name, every_n_train_steps=7, save_top_k=-1, filename="{step}")
        more = [ExactResume()] if resumes else []
        fit(tmp_path, Net(), *callbacks(), *more, save, enable_checkpointing=True)
        path = tmp_path / name / "step=14.ckpt"
        if resumes:
            trainer, _ = fit(tmp_path, Net(), *callbacks(), *more, ckpt_path=path)
            path = tmp_path / f"{name}.ckpt"
            trainer.save_checkpoint(path)
        found.append(torch.load(path, weights_only=False))
    for each in found:
        each["callbacks"] = {name: value for name, value in each["callbacks"].items() if "Checkpoint" not in name}
    check_equal(*found)
    rates = [group["lr"] for group in found[1]["optimizer_states"][0]["param_groups"]]
    assert [type(rate) for rate in rates] == [float, float]


class Root(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x)


class Rooted(Net):
    def __init__(self):
        super().__init__()
        self.net = Root(self.net)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_modules_are_captured_once_they_are_settled(tmp_path, backend, caplog):
    check_same(tmp_path, Rooted, more=lambda: [Compile(scope="model", backend=backend)], plugins=[BF16Precision()])
    assert "StepGraph: the step is one emulated graph" in lines(caplog)


def test_parameters_that_moved_are_captured_anew(tmp_path, caplog):
    class Moves(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            for parameter in pl_module.parameters():
                parameter.data = parameter.data.clone()

    check_same(tmp_path, more=lambda: [Moves()], graph=None)
    moved = [line for line in lines(caplog) if "have moved" in line]
    assert len(moved) == 2


def test_an_option_that_changes_leaves_the_optimizer_out(tmp_path, caplog):
    class Cycle(Net):
        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=40)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    check_same(tmp_path, Cycle)
    assert any("an option of the optimizer changes" in line for line in lines(caplog))


def test_a_second_fit_begins_anew(tmp_path):
    graph = StepGraph(emulate=True)
    check_same(tmp_path, graph=graph)
    check_same(tmp_path, graph=graph)


def stepping(step, **attributes):
    class Steps(Net):
        training_step = step

    module = Steps()
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def reads_value(self, batch, batch_idx):
    loss = self.net(batch[0]).square().mean()
    return loss if loss.item() > -1 else None


def reads_index(self, batch, batch_idx):
    return self.net(batch[0]).square().mean() * (2 if batch_idx % 2 else 1)


def logs_number(self, batch, batch_idx):
    self.log("number", 3.0)
    return self.net(batch[0]).square().mean()


def counts(self, batch, batch_idx):
    self.count += 1
    return self.net(batch[0]).square().mean()


def averages(self, batch, batch_idx):
    loss = self.net(batch[0]).square().mean()
    self.average = 0.9 * self.average + 0.1 * loss.detach()
    return loss


def draws(self, batch, batch_idx):
    return self.net(batch[0]).square().mean() * random.random()


CANNOT = {
    "value": (lambda: stepping(reads_value), r"test_step_graph.py:\d+: return loss if loss.item\(\) > -1 else None"),
    "index": (lambda: stepping(reads_index), "batch_idx is a constant"),
    "number": (lambda: stepping(logs_number), r"self.log\('number'\) gets a "),
    "count": (lambda: stepping(counts, count=0), "changes count on the host"),
    "average": (lambda: stepping(averages, average=torch.zeros(())), "changes average on the host"),
    "random": (lambda: stepping(draws), "changes random numbers of Python"),
}


@pytest.mark.parametrize("case", CANNOT)
def test_a_step_that_a_replay_cannot_repeat_is_an_error_by_name(tmp_path, case):
    make, said = CANNOT[case]
    with pytest.raises(RuntimeError, match=said):
        fit(tmp_path, make(), StepGraph(emulate=True))


def with_hook(name):
    return type("Hooked", (Callback,), {name: lambda self, *_: None})()


def reads_step(self, batch, batch_idx):
    return self.helper(batch)


def helper(self, batch):
    return self.net(batch[0]).square().mean() * (1 + self.global_step)


class Manual(Net):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class ReadsStep(Net):
    training_step, helper = reads_step, helper


REFUSED = {
    "hook": (Net, [with_hook("on_after_backward")], {}, "Hooked.on_after_backward"),
    "guard": (Net, [StepGuard()], {}, "given with StepGuard"),
    "compile": (Net, [Compile(mode="auto")], {}, "Compile, which may replay"),
    "manual": (Manual, [], {}, "Manual optimizes manually"),
    "step": (ReadsStep, [], {}, "ReadsStep reads global_step"),
    "masters": (Net, [], {"plugins": [BF16Precision(weights="masters")]}, "given with BF16Precision"),
    "anomaly": (Net, [], {"detect_anomaly": True}, "detect_anomaly"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_run_that_cannot_be_captured_is_refused(tmp_path, case):
    make, callbacks, options, said = REFUSED[case]
    with pytest.raises(ValueError, match=said):
        fit(tmp_path, make(), StepGraph(emulate=True), *callbacks, **options)


def test_it_needs_a_gpu_and_numbers_above_zero(tmp_path):
    with pytest.raises(ValueError, match="needs CUDA graphs"):
        fit(tmp_path, Net(), StepGraph())
    with pytest.raises(ValueError, match="warmup_steps"):
        StepGraph(warmup_steps=0)


def test_a_run_without_a_graph_warns(tmp_path):
    with pytest.warns(UserWarning, match="StepGraph captured no step"):
        fit(tmp_path, Net(), StepGraph(emulate=True, warmup_steps=100))


def test_values_that_are_no_tensors_keep_batches_apart(tmp_path):
    data = [{"x": torch.randn(4, 4), "name": str(index)} for index in range(300)]
    module = stepping(lambda self, batch, batch_idx: self.net(batch["x"]).square().mean())
    with pytest.warns(UserWarning, match=r"batches differ \('0' and '1'\)"):
        fit(tmp_path, module, StepGraph(emulate=True), data=DataLoader(data, batch_size=None), max_epochs=1)


def test_a_replay_makes_few_calls(tmp_path, monkeypatch):
    counts = []

    def counted(stock):
        def run(*args):
            calls = 0

            def count(frame, event, argument):
                nonlocal calls
                calls += event in ("call", "c_call")

            sys.setprofile(count)
            try:
                return stock(*args)
            finally:
                sys.setprofile(None)
                counts.append(calls)

        return run

    class Counts(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            loop = trainer.fit_loop.epoch_loop.automatic_optimization
            if trainer.global_step == 8:
                monkeypatch.setattr(EmulatedGraph, "replay", lambda self: None)
                loop.run = counted(loop.run)

        def on_train_end(self, trainer, pl_module):
            del trainer.fit_loop.epoch_loop.automatic_optimization.run

    fit(tmp_path, Net(), StepGraph(emulate=True), Counts(), max_epochs=1, accelerator="cpu")
    assert counts[1] <= MOST_CALLS
