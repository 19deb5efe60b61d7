"""``Compile(mode="auto")`` on a CPU, by a backend that replays into the same memory again, as CUDA graphs do."""

import gc
import json
import re
import warnings

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.utils.data import DataLoader

from lightning_ups._compat.torch.compile.cudagraph_trees import Recording
from lightning_ups.callbacks import Compile, OptimizerOffload
from lightning_ups.order import applied
from lightning_ups.precision import BF16Precision
from lightning_ups.transforms.compile.compiler import Compiled
from lightning_ups.transforms.compile.cuda_graphs import OwnGradients, Slot
from tests import backends
from tests.clocks import FixedClock, HostClock
from tests.toys import trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def own_backends(monkeypatch):
    backends.register()
    monkeypatch.setattr(
        "lightning_ups.callbacks.compile._RECORDING", ("ups_modes", "ups_modes_watched", *backends.FAIL_TO_RECORD)
    )
    monkeypatch.setattr(Recording, "count", property(lambda recording: len(recording.parts)))
    monkeypatch.setattr(Compiled, "ways", lambda compiled, waits: ["compiled"])  # nothing is compared as a whole
    torch.compiler.reset()
    backends.forget()


WAYS = Compiled.ways


class Core(nn.Module):
    """Draws, keeps statistics, and puts something aside."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Dropout(0.3))
        self.head = nn.Linear(8, 2)

    def forward(self, x, scale=1.0):
        self.aside = self.layers(x)
        return {"out": self.head(self.aside) * scale, "mean": self.aside.mean()}


class Keeper(LightningModule):
    """Keeps whatever a user may keep: losses, outputs, what the model put aside, gradients, predictions."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.core = Core()
        self.kept, self.grads = [], []

    def training_step(self, batch, index):
        outputs = self.core(batch)
        loss = outputs["out"].square().mean() + outputs["mean"]
        self.kept += [loss.detach(), outputs["out"], self.core.aside, outputs["mean"]]
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def on_before_optimizer_step(self, optimizer):
        self.grads.append([p.grad.clone() for p in self.parameters() if p.grad is not None])

    def validation_step(self, batch, index):
        self.kept.append(self.core(batch)["out"])

    def predict_step(self, batch):
        return self.core(batch)["out"]

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def rows(count, size, *, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(torch.randn(count, 4, generator=generator), batch_size=size)


def run(tmp_path, monkeypatch, compile_=None, *, module=Keeper, clock=None, batches=None, callbacks=(), **options):
    """Fit, validate on the way and predict; return all that is left behind."""
    if clock is not None:
        monkeypatch.setattr("lightning_ups.callbacks.compile._clock", lambda device: clock)
    model = module()
    torch.manual_seed(5)
    options = {"epochs": 2, "val_check_interval": 2, **options}
    lightning = trainer(tmp_path, callbacks=[*([compile_] if compile_ else []), *callbacks], **options)
    lightning.fit(model, batches or rows(20, 4), rows(4, 4))
    return {
        "kept": [value.tolist() for value in model.kept],
        "grads": [[grad.tolist() for grad in grads] for grads in model.grads],
        "state": {name: value.tolist() for name, value in model.state_dict().items()},
        "random": torch.get_rng_state().tolist(),
        "logged": {name: value.item() for name, value in lightning.logged_metrics.items()},
        "predicted": [value.tolist() for value in lightning.predict(model, rows(8, 4))],
    }


PLAIN = {}


def plain(tmp_path, monkeypatch, **options):
    """Return what is left behind without CUDA graphs; for the same options it is made once."""
    asked = str(sorted(options.items()))
    if asked not in PLAIN:
        compile_ = Compile(scope="model", backend="ups_modes")
        PLAIN[asked] = run(tmp_path, monkeypatch, compile_, **options)
    return PLAIN[asked]


@pytest.fixture
def reports(monkeypatch):
    """Collect the reports of all runs that choose their mode."""
    found = []
    make = Compile._make_replay

    def keep(self, module, scope, context):
        if self.chooses_mode:
            found.append(context.report)
        return make(self, module, scope, context)

    monkeypatch.setattr(Compile, "_make_replay", keep)
    return found


def lines(report):
    return [line for line in report.parts["Compile"]["lines"] if "mode auto" in line]


def auto(**options):
    return Compile(**{"scope": "model", "mode": "auto", "backend": "ups_modes", **options})


@pytest.mark.parametrize("accumulate", [1, 2])
def test_graphs_are_chosen_and_leave_everything_bitwise_as_it_is(tmp_path, monkeypatch, reports, accumulate):
    options = {"accumulate_grad_batches": accumulate, "gradient_clip_val": 0.5}
    expected = plain(tmp_path, monkeypatch, **options)
    actual = run(tmp_path, monkeypatch, auto(), clock=(clock := FixedClock(6.1, 5.2)), **options)
    assert actual == expected
    assert clock.measured > 1
    # Ten steps, of which the first is measured; three recorded forwards and backwards are a rehearsal.
    assert len(backends.RECORDED) == 2 * (9 + 3)
    assert lines(reports[0]) == [
        "mode auto: decided after the first steps, by what launching and computing take",
        "mode auto: CUDA graphs, since launching takes 6.1 ms and the device 5.2",
    ]
    facts = reports[0].parts["Compile"]
    assert facts["mode"] == "auto"
    assert facts["chosen"]["mode"] == "reduce-overhead"
    assert (facts["graphs"], facts["chosen"]["recorded"]) == (2, 2)  # the other is for evaluation
    assert lines(reports[-1]) == ["mode auto: default, since nothing is trained"]  # while it predicts
    json.dumps(facts)


def test_a_device_that_is_busy_keeps_the_default_mode(tmp_path, monkeypatch, reports, caplog):
    expected = plain(tmp_path, monkeypatch)
    with caplog.at_level("INFO"):
        actual = run(tmp_path, monkeypatch, auto(), clock=FixedClock(9, 250))
    assert actual == expected
    assert backends.RECORDED == []
    assert lines(reports[0])[1:] == ["mode auto: default, since launching takes 9 ms and the device 250"]
    said = [r.getMessage() for r in caplog.records if "launching takes 9" in r.getMessage()]
    assert said == ["Compile: mode auto: default, since launching takes 9 ms and the device 250"]


class Holding(Keeper):
    """Keeps a gradient as the backward left it."""

    def on_train_start(self):
        self.held = []
        self.core.head.weight.register_hook(self.held.append)


@pytest.mark.parametrize(("module", "accumulate"), [(Keeper, 1), (Keeper, 2), (Holding, 2)])
def test_when_the_next_step_begins_nothing_is_left_in_memory_of_the_graphs(tmp_path, monkeypatch, module, accumulate):
    # Torch writes to that memory again only if it is dead, and records anew if it is not.
    options = {"module": module, "accumulate_grad_batches": accumulate, "precision": "bf16-mixed"}
    run(tmp_path, monkeypatch, auto(backend="ups_modes_watched"), clock=FixedClock(6.1, 5.2), **options)
    rehearsed, steps = backends.ALIVE[:4], backends.ALIVE[4:]
    assert rehearsed == [0] * 4
    assert steps == [1 if module is Holding else 0] * 8  # which is what makes torch record anew


class Layers(LightningModule):
    """Keeps nothing but gradients, of layers whose weights may all have masters."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.core = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
        self.kept, self.grads = [], []

    def training_step(self, batch, index):
        return self.core(batch).square().mean()

    def on_before_optimizer_step(self, optimizer):
        self.grads.append([p.grad.clone() for p in self.parameters() if p.grad is not None])

    def predict_step(self, batch):
        return self.core(batch)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Lbfgs(Layers):
    """Goes forward and backward several times in each step."""

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3, tolerance_grad=0, tolerance_change=0)


def test_when_a_step_goes_forward_again_nothing_is_left_in_memory_of_the_graphs(tmp_path, monkeypatch):
    expected = plain(tmp_path, monkeypatch, module=Lbfgs)
    actual = run(tmp_path, monkeypatch, asked(), module=Lbfgs)
    assert actual["state"] == expected["state"]
    torch.compiler.reset()
    run(tmp_path, monkeypatch, asked(backend="ups_modes_watched"), module=Lbfgs)
    assert len(backends.ALIVE) > 20
    assert not any(backends.ALIVE)


@pytest.mark.parametrize("mode", ["auto", "reduce-overhead"])
@pytest.mark.parametrize(
    ("options", "copied"),
    [({}, 0), ({"accumulate_grad_batches": 2}, 0), ({"plugins": [], "precision": "bf16-mixed"}, 4)],
    ids=["master weights", "accumulated", "autocast"],
)
def test_gradients_are_copied_only_if_the_next_forward_finds_them(tmp_path, monkeypatch, mode, options, copied):
    made, take = [], OwnGradients.take

    def watched(self):
        take(self)
        made.append(sum(own is not None for own in self._own))

    monkeypatch.setattr(OwnGradients, "take", watched)
    options = {"plugins": [BF16Precision(weights="masters")], "gradient_clip_val": 0.5, **options}
    compile_ = Compile(scope="model", backend="ups_modes", mode=mode)
    run(tmp_path, monkeypatch, compile_, clock=FixedClock(6.1, 5.2), module=Layers, **options)
    assert len(backends.RECORDED) > 16
    assert len(made) >= 8
    assert set(made) == {copied}


def test_after_a_run_gradients_are_in_memory_of_their_own(tmp_path, monkeypatch):
    model = Layers()
    trainer(tmp_path, callbacks=[asked()], epochs=1).fit(model, rows(20, 4))
    memory = {m.untyped_storage().data_ptr() for graph in backends.RECORDED for m in graph._memory if m is not None}
    grads = [p.grad for p in model.parameters()]
    assert memory
    assert memory.isdisjoint(grad.untyped_storage().data_ptr() for grad in grads)
    assert [grad.tolist() for grad in grads] == [grad.tolist() for grad in model.grads[-1]]


class Sampling(Layers):
    """Runs its model between two batches, in inference mode, where tensors are made that nothing may write to later."""

    def on_train_batch_end(self, outputs, batch, index):
        with torch.inference_mode():
            self.kept.append(self.core(batch))


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("mode", ["auto", "reduce-overhead"])
def test_gradients_that_a_forward_in_inference_mode_has_moved_can_be_written_to(
    tmp_path, monkeypatch, mode, accumulate
):
    options = {"module": Sampling, "accumulate_grad_batches": accumulate, "gradient_clip_val": 0.5}
    expected = plain(tmp_path, monkeypatch, **options)
    actual = run(tmp_path, monkeypatch, auto(mode=mode), clock=FixedClock(6.1, 5.2), **options)
    assert len(backends.RECORDED) > 16
    assert actual == expected


class NoRoom(Layers):
    """Meets its limit where an optimizer makes its state."""

    def on_before_optimizer_step(self, optimizer):
        super().on_before_optimizer_step(optimizer)
        if len(self.grads) == 2:
            raise torch.OutOfMemoryError("no room for state")


def test_after_an_error_no_memory_is_asked_for(tmp_path, monkeypatch):
    model, moved, take = NoRoom(), [], OwnGradients.take
    monkeypatch.setattr(OwnGradients, "take", lambda self: moved.append(len(model.grads)) or take(self))
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        trainer(tmp_path, callbacks=[asked()], epochs=1).fit(model, rows(20, 4))
    assert moved == [1]  # when the second step began


class Beside(Callback):
    """Trains a model that is equal to the one in training, between two batches that are accumulated."""

    def __init__(self, compile_, tmp_path):
        self.compile, self.tmp_path = compile_, tmp_path

    def on_train_batch_end(self, lightning, pl_module, outputs, batch, batch_idx):
        with torch.random.fork_rng():
            other = Layers()
            trainer(self.tmp_path, callbacks=[self.compile], epochs=1).fit(other, rows(4, 4, seed=9))


def test_a_run_inside_another_leaves_its_gradients_alone(tmp_path, monkeypatch):
    options = {"module": Layers, "accumulate_grad_batches": 2, "epochs": 1, "val_check_interval": 1.0}
    expected = plain(tmp_path, monkeypatch, **options)
    compile_ = asked()
    actual = run(tmp_path, monkeypatch, compile_, callbacks=[Beside(compile_, tmp_path)], **options)
    assert actual["grads"] == expected["grads"]


def test_without_copies_what_is_kept_would_be_overwritten(tmp_path, monkeypatch):
    expected = plain(tmp_path, monkeypatch)
    replay = Slot.run

    def as_it_is(slot, run, args):
        slot._positions = []
        return replay(slot, run, args)

    monkeypatch.setattr(Slot, "run", as_it_is)
    actual = run(tmp_path, monkeypatch, auto(), clock=FixedClock(6.1, 5.2))
    assert actual["kept"] != expected["kept"]


def test_without_own_gradients_accumulation_would_be_wrong(tmp_path, monkeypatch):
    expected = plain(tmp_path, monkeypatch, accumulate_grad_batches=2)
    monkeypatch.setattr("lightning_ups.transforms.compile.cuda_graphs.OwnGradients.take", lambda self: None)
    actual = run(tmp_path, monkeypatch, auto(), clock=FixedClock(6.1, 5.2), accumulate_grad_batches=2)
    assert actual["grads"] != expected["grads"]


def test_other_sizes_run_without_a_recording_and_are_never_recorded(tmp_path, monkeypatch):
    generator = torch.Generator().manual_seed(4)
    batches = [torch.randn(size, 4, generator=generator) for size in (4, 4, 3, 6, 5, 4, 7, 8, 4, 9, 10, 4)]
    options = {"batches": DataLoader(batches, batch_size=None), "epochs": 1, "val_check_interval": 1.0}
    expected = plain(tmp_path, monkeypatch, **options)
    actual = run(tmp_path, monkeypatch, auto(), clock=FixedClock(6.1, 5.2), **options)
    assert actual == expected
    assert len(backends.RECORDED) == 2 * (4 + 3)  # the other four batches of four, and the rehearsal


class Twice(Keeper):
    def training_step(self, batch, index):
        return super().training_step(batch, index) + self.core(batch * 2)["out"].mean()


class TwiceLater(Keeper):
    """Calls the model for a second time once it is recorded."""

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        return loss + self.core(batch * 2)["out"].mean() if self.global_step > 3 else loss


class Apart(Keeper):
    def __init__(self):
        super().__init__()
        self.tail = nn.Linear(2, 2)

    def training_step(self, batch, index):
        return self.tail(self.core(batch)["out"]).square().mean()


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("module", [Twice, Apart])
def test_all_graphs_of_a_step_are_replayed(tmp_path, monkeypatch, reports, module, accumulate):
    options = {"module": module, "accumulate_grad_batches": accumulate, "gradient_clip_val": 0.5}
    expected = plain(tmp_path, monkeypatch, **options)
    actual = run(tmp_path, monkeypatch, auto(), clock=FixedClock(6.1, 5.2), **options)
    assert actual == expected
    assert len(backends.RECORDED) == 2 * 2 * (9 + 3)
    assert lines(reports[0])[-1].startswith("mode auto: CUDA graphs, since launching takes 12.2 ms")


def test_a_second_call_in_a_step_does_not_touch_the_recording(tmp_path, monkeypatch):
    expected = plain(tmp_path, monkeypatch, module=TwiceLater)
    actual = run(tmp_path, monkeypatch, auto(), module=TwiceLater, clock=FixedClock(6.1, 5.2))
    assert actual == expected
    assert len(backends.RECORDED) == 2 * (9 + 3)


class Manual(Keeper):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        self.manual_backward(loss)
        self.optimizers().step()
        self.optimizers().zero_grad()


@pytest.mark.parametrize(
    ("options", "more", "why"),
    [
        ({"scope": "blocks"}, {}, r"blocks are compiled one by one.*scope='auto'"),
        ({"backend": "aot_eager"}, {}, "the backend aot_eager records no CUDA graphs"),
        ({"dynamic": True}, {}, "sizes vary, by dynamic=True"),
        ({}, {"module": Manual}, "the module optimizes manually"),
        ({}, {"clock": None}, "this run is on cpu"),
    ],
    ids=["blocks", "backend", "dynamic", "manual", "cpu"],
)
def test_where_graphs_are_not_chosen_nothing_is_measured_and_the_reason_is_said(
    tmp_path, monkeypatch, reports, options, more, why
):
    clock = FixedClock(6.1, 5.2)
    more = {"clock": clock, **more}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*CUDA graphs.*")  # nobody asked for them
        run(tmp_path, monkeypatch, auto(**options), epochs=1, **more)
    assert (clock.measured, backends.RECORDED) == (0, [])
    (line,) = lines(reports[0])
    assert line.startswith("mode auto: default, since ")
    assert re.search(why, line)
    assert reports[0].parts["Compile"]["chosen"]["mode"] == "default"


class Moving(OptimizerOffload):
    def setup(self, *args, **kwargs):
        pass

    def wrap(self, optimizer, context):
        return optimizer


def test_graphs_are_not_chosen_beside_what_moves_memory(tmp_path, monkeypatch, reports):
    compile_ = auto(scope="auto")
    run(tmp_path, monkeypatch, compile_, clock=FixedClock(6.1, 5.2), callbacks=[Moving()], epochs=1)
    assert lines(reports[0]) == ["mode auto: default, since Moving moves memory by itself"]


def several(tmp_path, strategy):
    warnings.simplefilter("ignore")
    backends.register()
    found = []
    model = Keeper()
    model.on_train_batch_end = lambda *_: found.append(applied(model.trainer.strategy).report.parts["Compile"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_ups.callbacks.compile._clock", lambda device: FixedClock(6.1, 5.2))
        callbacks = [auto(scope="auto")]
        trainer(tmp_path, strategy=strategy, devices=2, callbacks=callbacks, epochs=1).fit(model, rows(4, 2))
    return [line for line in found[-1]["lines"] if "mode auto" in line]


def test_graphs_are_not_chosen_on_several_devices(ranks, tmp_path):
    (line,) = ranks(several, tmp_path, "ddp")
    assert line.startswith("mode auto: default, since DDPStrategy has a group of processes")
    (line,) = ranks(several, tmp_path, "fsdp2")
    assert line == "mode auto: default, since FSDP2Strategy shards the weights"


@pytest.mark.parametrize("backend", backends.FAIL_TO_RECORD)
def test_a_recording_that_fails_harms_nothing(tmp_path, monkeypatch, reports, backend):
    expected = plain(tmp_path, monkeypatch)
    with pytest.warns(UserWarning, match=r"gives up CUDA graphs, which mode='auto' had chosen.*Set mode='default'"):
        actual = run(tmp_path, monkeypatch, auto(backend=backend), clock=FixedClock(6.1, 5.2))
    assert actual == expected
    assert lines(reports[0])[-1].startswith("mode auto: default, since CUDA graphs were given up: ")
    assert reports[0].parts["Compile"]["chosen"]["mode"] == "default"


class Scheduled(Keeper):
    """Has an attribute that the model reads and the module changes."""

    def training_step(self, batch, index):
        self.core.layers[3].p = 0.3 if self.global_step < 4 else 0.1
        return super().training_step(batch, index)


def test_a_model_that_changes_is_recorded_anew(tmp_path, monkeypatch, reports):
    expected = plain(tmp_path, monkeypatch, module=Scheduled)
    actual = run(tmp_path, monkeypatch, auto(), module=Scheduled, clock=FixedClock(6.1, 5.2))
    assert actual == expected
    assert lines(reports[0])[-1].startswith("mode auto: CUDA graphs, since launching")
    assert reports[0].parts["Compile"]["chosen"]["recorded"] == 4


def test_recordings_that_grow_are_given_up(tmp_path, monkeypatch, reports):
    grown = iter(range(2, 1000, 2))
    monkeypatch.setattr(Recording, "count", property(lambda recording: next(grown)))
    expected = plain(tmp_path, monkeypatch)
    with pytest.warns(UserWarning, match="recorded anew in one step after another"):
        actual = run(tmp_path, monkeypatch, auto(), clock=FixedClock(6.1, 5.2))
    assert actual == expected
    assert 2 * 3 < len(backends.RECORDED) < 2 * (9 + 3)
    assert "recorded anew" in lines(reports[0])[-1]


def test_that_nothing_is_recorded_is_said(tmp_path, monkeypatch, reports):
    monkeypatch.setattr(Recording, "count", 0)
    with pytest.warns(UserWarning, match="inductor records none: nothing of the model can be recorded"):
        run(tmp_path, monkeypatch, auto(), clock=FixedClock(6.1, 5.2))
    assert lines(reports[0])[-1].startswith(
        "mode auto: default, since CUDA graphs were given up: inductor records none"
    )


def test_outputs_that_take_long_to_copy_forbid_graphs(tmp_path, monkeypatch, reports):
    monkeypatch.setattr("lightning_ups.transforms.compile.mode.COPY_MS", 1.0)
    run(tmp_path, monkeypatch, auto(), clock=FixedClock(6.1, 5.2))
    assert backends.RECORDED == []
    assert "more for copies of what the model returns" in lines(reports[0])[-1]


def test_a_second_fit_measures_and_chooses_anew(tmp_path, monkeypatch, reports):
    monkeypatch.setattr("lightning_ups.callbacks.compile._clock", lambda device: FixedClock(6.1, 5.2))
    compile_ = auto()
    for _ in range(2):
        model = Keeper()
        trainer(tmp_path, callbacks=[compile_], epochs=1).fit(model, rows(12, 4))
    assert [lines(report)[-1].startswith("mode auto: CUDA graphs") for report in reports] == [True, True]
    assert len(backends.RECORDED) == 2 * 2 * (2 + 3)
    assert not any("forward" in vars(module) for module in model.modules())


class Skips(Keeper):
    """Has steps without a backward; keeps of them what could still have one, if it keeps anything."""

    keeps = False

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        if index not in (0, 3):
            return loss
        if not self.keeps:
            self.kept = [value.detach() for value in self.kept]
            self.core.aside = None
        return None


class SkipsAndKeeps(Skips):
    keeps = True


LONG = {"epochs": 1, "val_check_interval": 1.0, "batches": rows(32, 4)}


def test_a_skipped_step_neither_decides_nor_stops_replaying(tmp_path, monkeypatch):
    expected = plain(tmp_path, monkeypatch, module=Skips, **LONG)
    actual = run(tmp_path, monkeypatch, auto(), module=Skips, clock=FixedClock(6.1, 5.2), **LONG)
    assert actual == expected
    assert len(backends.RECORDED) == 2 * (5 + 3) + 1  # the forward of the step that is skipped


def test_a_forward_that_could_still_have_its_backward_is_not_written_over(tmp_path, monkeypatch, reports):
    monkeypatch.setattr("lightning_ups.transforms.compile.replay.MOST_WAITS", 3)
    expected = plain(tmp_path, monkeypatch, module=SkipsAndKeeps, **LONG)
    with pytest.warns(UserWarning, match="keeps what the model returned in a step that had no backward"):
        actual = run(tmp_path, monkeypatch, auto(), module=SkipsAndKeeps, clock=FixedClock(6.1, 5.2), **LONG)
    assert actual == expected
    assert len(backends.RECORDED) == 2 * (1 + 3) + 1
    assert "which may still come" in lines(reports[0])[-1]


class Late(Keeper):
    """Goes backward through two steps at once."""

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        if index % 2 == 0:
            self.earlier = loss
            return None
        earlier, self.earlier = self.earlier, None
        return loss + earlier


def test_a_backward_may_come_in_a_later_step(tmp_path, monkeypatch):
    expected = plain(tmp_path, monkeypatch, module=Late, **LONG)
    actual = run(tmp_path, monkeypatch, auto(), module=Late, clock=FixedClock(6.1, 5.2), **LONG)
    assert actual == expected
    assert len(backends.RECORDED) == 2 * (3 + 3)  # every second step, after the first two


@pytest.mark.slow
def test_inductor_compiles_for_the_recording_what_it_compiles_without(tmp_path, monkeypatch, reports):
    monkeypatch.setattr("lightning_ups.callbacks.compile._RECORDING", ("inductor",))
    monkeypatch.setattr(Recording, "count", 1)  # which a CPU does not make
    expected = run(tmp_path, monkeypatch, Compile(scope="model"))
    actual = run(tmp_path, monkeypatch, auto(backend="inductor"), clock=FixedClock(6.1, 5.2))
    assert lines(reports[0])[-1].startswith("mode auto: CUDA graphs")
    assert actual == expected


class Costly(FixedClock):
    """Says that steps in which something was replayed take longer, or less long, than others."""

    def __init__(self, launch, device, *, replayed, launched):
        super().__init__(launch, device)
        self.costs, self.seen, self.paid = (launched, replayed), 0, 0.0

    def wait(self):
        self.paid += self.costs[len(backends.RECORDED) > self.seen]
        self.seen = len(backends.RECORDED)

    def now(self):
        return super().now() + self.paid


@pytest.mark.parametrize(("replayed", "launched", "mode"), [(9.0, 3.0, "default"), (3.0, 9.0, "reduce-overhead")])
def test_graphs_stay_only_if_whole_steps_are_faster(tmp_path, monkeypatch, reports, replayed, launched, mode):
    monkeypatch.setattr(Compiled, "ways", WAYS)
    options = {"batches": rows(40 * 4, 4), "epochs": 1, "val_check_interval": 1.0, "accumulate_grad_batches": 1}
    expected = plain(tmp_path, monkeypatch, **options)
    clock = Costly(6.1, 5.2, replayed=replayed, launched=launched)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*CUDA graphs.*")
        actual = run(tmp_path, monkeypatch, auto(), clock=clock, **options)
    assert actual == expected
    facts = reports[0].parts["Compile"]
    assert facts["chosen"]["mode"] == mode
    assert "ms with CUDA graphs" in facts["steps"]
    if mode == "default":
        assert "a step takes" in lines(reports[0])[-1]


class Parts(Layers):
    """Has a graph break."""

    def __init__(self):
        super().__init__()
        self.core = Broken()


class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x):
        hidden = self.first(x).tanh()
        torch._dynamo.graph_break()  # noqa: TID251
        return self.second(hidden)


@pytest.mark.parametrize("slow", [True, False])
def test_a_model_in_parts_stays_compiled_only_if_whole_steps_are_faster(tmp_path, monkeypatch, slow):
    monkeypatch.setattr(Compiled, "ways", WAYS)
    monkeypatch.setattr("lightning_ups.transforms.compile.compiler.gain_of", lambda *_, **__: None)
    monkeypatch.setattr("lightning_ups.transforms.compile.frame.is_small", lambda graph: False)
    backend = "ups_slow" if slow else "ups_aot_as_it_is"
    clock = HostClock() if slow else Costly(6.1, 5.2, replayed=1.0, launched=1.0)
    model = Parts()
    monkeypatch.setattr("lightning_ups.callbacks.compile._clock", lambda device: clock)
    compile_, found = Compile(scope="auto", backend=backend), []
    model.on_train_batch_end = lambda *_: found.append(applied(model.trainer.strategy).report.parts["Compile"])
    trainer(tmp_path, callbacks=[compile_], epochs=3, val_check_interval=1.0).fit(model, rows(50 * 4, 4))
    assert "ms uncompiled" in found[-1]["steps"]
    assert found[-1]["eager"] == (["core"] if slow else [])
    assert any("nothing stays compiled" in line for line in found[-1]["lines"]) == slow
    assert len(model.core(torch.ones(3, 4))) == 3


def test_cli_takes_it_and_refuses_others(tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text(
        "trainer:\n  accelerator: cpu\n  logger: false\n  callbacks:\n"
        "    - class_path: lightning_ups.callbacks.Compile\n      init_args: {scope: auto, mode: auto}\n"
    )
    cli = LightningCLI(Keeper, run=False, args=["--config", str(config)], save_config_callback=None)
    (callback,) = [c for c in cli.trainer.callbacks if isinstance(c, Compile)]
    assert (callback.chooses_mode, callback.replays_cuda_graphs, callback.compiler.mode) == (True, False, "default")
    with pytest.raises(ValueError, match=r"mode='automatic'.*Use one of \('default', .*'auto'\)"):
        Compile(mode="automatic")


class Returned(Keeper):
    """Keeps what the model returns, and not what it puts aside."""

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        del self.kept[-2]
        return loss


@pytest.mark.parametrize("accumulate", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_graphs_that_are_asked_for_keep_what_the_model_returns_too(tmp_path, monkeypatch, accumulate):
    options = {"module": Returned, "accumulate_grad_batches": accumulate}
    expected = plain(tmp_path, monkeypatch, **options)
    asked = Compile(scope="model", backend="ups_modes", mode="reduce-overhead")
    actual = run(tmp_path, monkeypatch, asked, **options)
    assert len(backends.RECORDED) > 20
    assert actual == expected


def asked(**options):
    return Compile(**{"scope": "model", "mode": "reduce-overhead", "backend": "ups_modes", **options})


@pytest.mark.parametrize("scope", ["model", "blocks"])
def test_a_backward_after_another_step_of_graphs_that_are_asked_for_is_an_error(tmp_path, monkeypatch, scope):
    expected = plain(tmp_path, monkeypatch, module=Late, **LONG)
    wrong = run(tmp_path, monkeypatch, asked(), module=Late, **LONG)  # a CPU has no graphs, but for this backend
    assert wrong["grads"] != expected["grads"]
    monkeypatch.setattr("lightning_ups.callbacks.compile._records", lambda device: True)
    compile_ = Compile(scope=scope, backend="ups_modes", mode="reduce-overhead")
    with pytest.raises(RuntimeError, match=r"in a later step than its forward.*Compile\(mode='auto'\)"):
        run(tmp_path, monkeypatch, compile_, module=Late, **LONG)


def test_torch_tells_steps_by_itself_again_after_a_run(tmp_path, monkeypatch):
    trees = pytest.importorskip("torch._inductor.cudagraph_trees")
    marks = []
    module = Returned()
    module.on_train_batch_end = lambda *_: marks.append(trees.MarkStepBox.mark_step_counter)
    monkeypatch.setattr(trees.MarkStepBox, "mark_step_counter", 0)
    run(tmp_path, monkeypatch, asked(), module=lambda: module)
    assert len({*marks}) == len(marks) > 1
    assert trees.MarkStepBox.mark_step_counter == 0


class KeepsLosses(Returned):
    def training_step(self, batch, index):
        self.kept.append(loss := super().training_step(batch, index))  # with the graph that it came by
        return loss


@pytest.mark.parametrize("module", [Returned, KeepsLosses, Skips])
def test_what_has_no_late_backward_is_no_error(tmp_path, monkeypatch, module):
    monkeypatch.setattr("lightning_ups.callbacks.compile._records", lambda device: True)
    options = {"module": module, "accumulate_grad_batches": 2}
    run(tmp_path, monkeypatch, asked(), **options)


def test_graphs_that_are_asked_for_say_which_outputs_are_too_large_to_copy(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_ups.transforms.compile.compiler.COPIED_BYTES", 30)
    asked = Compile(scope="model", backend="ups_modes", mode="reduce-overhead")
    with pytest.warns(
        UserWarning, match=r"core \(Core\) returns 0 MiB in memory that CUDA graphs.*Keep copies: output"
    ):
        actual = run(tmp_path, monkeypatch, asked, module=Returned)
    expected = plain(tmp_path, monkeypatch, module=Returned)
    assert actual["kept"] != expected["kept"]  # as it says
    assert actual["grads"] == expected["grads"]


@pytest.mark.parametrize("mode", ["default", "auto"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_is_faster_uncompiled_runs_so_after_the_first_step(
    tmp_path, monkeypatch, reports, caplog, mode, accumulate
):
    options = {"accumulate_grad_batches": accumulate, "gradient_clip_val": 0.5}
    expected = run(tmp_path, monkeypatch, **options)
    monkeypatch.setattr("lightning_ups.callbacks.compile._RECORDING", ("ups_modes_slow",))
    compile_ = Compile(scope="auto", mode=mode, backend="ups_modes_slow")
    monkeypatch.setattr("lightning_ups.transforms.compile.frame.is_small", lambda graph: False)
    with caplog.at_level("INFO"):
        actual = run(tmp_path, monkeypatch, compile_, clock=HostClock(device=100.0), **options)
    assert actual == expected
    said = [message for message in caplog.messages if "uncompiled" in message]
    number = r"[\d.e+]+"
    pattern = (
        rf"Compile: core \(Core\) runs uncompiled from now on: .*take {number} ms compiled and {number} ms uncompiled"
    )
    assert [bool(re.fullmatch(pattern, message)) for message in said] == [True]


def facts_of_group(tmp_path, monkeypatch, compile_, clock, **options):
    found = []
    monkeypatch.setattr("lightning_ups.transforms.compile.frame.is_small", lambda graph: False)

    class Looking(Keeper):
        def on_train_batch_end(self, outputs, batch, index):
            found.append(applied(self.trainer.strategy).report)

    run(tmp_path, monkeypatch, compile_, clock=clock, module=Looking, **options)
    (group,) = found[-1].parts["Compile"]["groups"]
    return group


def test_what_was_measured_is_in_the_report_and_what_gains_stays_compiled(tmp_path, monkeypatch):
    slow = facts_of_group(tmp_path, monkeypatch, Compile(scope="auto", backend="ups_slow"), HostClock())
    assert slow["gain"]["compiled_ms"] > backends.SLOW_MS
    assert slow["gain"]["compiled_ms"] > slow["gain"]["eager_ms"]
    assert {*slow["eager"]} == {"training", "evaluation"}
    monkeypatch.setattr("lightning_ups.transforms.compile.gain.Gain.is_loss", False)
    fast = facts_of_group(tmp_path, monkeypatch, Compile(scope="auto", backend="ups_slow"), HostClock())
    assert fast["gain"] is not None
    assert fast["eager"] == {}


@pytest.mark.parametrize(
    "options", [{"scope": "model"}, {"scope": "auto", "fullgraph": True}, {"scope": "auto", "on_failure": "raise"}]
)
def test_what_was_asked_for_is_not_measured(tmp_path, monkeypatch, options):
    group = facts_of_group(tmp_path, monkeypatch, Compile(backend="ups_slow", **options), HostClock())
    assert group["gain"] is None
    assert group["eager"] == {}


def test_what_replays_cuda_graphs_is_not_measured(tmp_path, monkeypatch):
    group = facts_of_group(tmp_path, monkeypatch, auto(scope="auto"), FixedClock(6.1, 5.2))
    assert backends.RECORDED
    assert group["gain"] is None


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 77), nn.Linear(77, 2)

    def forward(self, x):
        hidden = self.first(x).exp()
        torch._dynamo.graph_break()  # noqa: TID251
        return self.second(hidden.tanh())


class Holey(Layers):
    """Fails in its second graph, to which the first has handed a tensor of 77 columns."""

    def __init__(self):
        super().__init__()
        self.core, self.alive = Wide(), []

    def on_train_batch_end(self, *_):
        tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor]
        self.alive.append(sum(each.dim() == 2 and each.shape[1] == 77 and not each.is_leaf for each in tensors))


def test_a_failure_leaves_no_tensors_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_ups.transforms.compile.frame.is_small", lambda graph: False)
    gc.collect()
    gc.disable()
    model = Holey()
    try:
        with pytest.warns(UserWarning, match="runs uncompiled in training"):
            trainer(tmp_path, callbacks=[Compile(scope="auto", backend="ups_no_tanh_backward")], epochs=1).fit(
                model, rows(5 * 4, 4)
            )
    finally:
        gc.enable()
    assert model.alive[1:] == [0] * (len(model.alive) - 1)
