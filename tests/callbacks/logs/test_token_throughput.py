"""TokenThroughput measures without slowing, waiting or changing anything."""

import csv
import time
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, Dataset

from lightning_ups.callbacks import RunManifest, TokenThroughput
from lightning_ups.insight.throughput import bottlenecks, first_change, timeline
from tests.toys import Net, loader, trainer


def steps(count, *, epochs=1):
    return {"epochs": epochs, "limit_train_batches": count}


class Many(Dataset):
    def __init__(self, length=64, *, sleep=0.0):
        self.length, self.sleep = length, sleep

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if self.sleep:
            time.sleep(self.sleep)
        return torch.full((8,), float(index))


def many(length=64, *, sleep=0.0, batch_size=2):
    return DataLoader(Many(length, sleep=sleep), batch_size=batch_size)


def fitted(tmp_path, module=None, data=None, *, callbacks=(), epochs=1, **settings):
    options = {key: settings.pop(key) for key in [*settings] if key in OPTIONS}
    throughput = TokenThroughput(**{"warmup_steps": 2, "unit": "samples", "table": False} | settings)
    made = trainer(tmp_path, callbacks=[throughput, *callbacks], epochs=epochs, **options)
    made.fit(module or Net(), many() if data is None else data)
    return throughput, made


def mean_step(summary):
    return summary.units_per_step / summary.units_per_s


OPTIONS = ("profiler", "accumulate_grad_batches", "limit_train_batches", "max_steps", "val_check_interval")


def test_training_is_the_same_bit_for_bit(tmp_path):
    nets = []
    for callbacks in ([], [TokenThroughput(warmup_steps=0, table=False)]):
        torch.manual_seed(0)
        net = Net()
        trainer(tmp_path, callbacks=callbacks, epochs=2).fit(net, many())
        nets.append(net)
    assert torch.equal(*(torch.stack(net.losses) for net in nets))


def test_rates_are_those_of_a_stopwatch(tmp_path):
    class Stopwatch(Callback):
        def on_train_batch_start(self, trainer, *_):
            if trainer.global_step == 2:
                self.start = time.perf_counter()

        def on_train_end(self, *_):
            self.seconds = time.perf_counter() - self.start

    watch = Stopwatch()
    throughput, _ = fitted(tmp_path, data=many(sleep=0.01), callbacks=[watch])  # interruptions are little
    by_hand = 30 * 2 / watch.seconds
    assert throughput.summary.steps == 30
    assert throughput.summary.units_per_s == pytest.approx(by_hand, rel=0.05)
    assert throughput.summary.units_per_step == 2


def test_a_step_is_split_among_who_took_the_time(tmp_path):
    class Slow(Net):
        def training_step(self, batch, index):
            time.sleep(0.02)
            return super().training_step(batch, index)

        def backward(self, loss):
            time.sleep(0.01)
            super().backward(loss)

        def on_before_optimizer_step(self, optimizer):
            time.sleep(0.03)

    throughput, _ = fitted(tmp_path, Slow(), many(16, sleep=0.02))  # two samples a batch: 0.04 s
    split = throughput.summary.split
    for phase, seconds in {"forward": 0.02, "backward": 0.01, "optimizer": 0.03, "data": 0.04}.items():
        assert split[phase] * mean_step(throughput.summary) >= seconds * 0.99, phase
    assert sum(split.values()) == pytest.approx(1)
    assert split["data"] > split["optimizer"] > split["backward"]


def test_an_accumulation_is_one_step(tmp_path):
    throughput, made = fitted(tmp_path, accumulate_grad_batches=4)
    assert made.global_step == 8
    assert throughput.summary.steps == 6
    assert throughput.summary.units_per_step == 8


def test_validation_and_checkpoints_are_no_part_of_a_step(tmp_path):
    class Validated(Net):
        def validation_step(self, batch, index):
            time.sleep(0.05)

        def val_dataloader(self):
            return many(4)

    class Saving(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, index):
            if index % 4 == 1:
                trainer.save_checkpoint(tmp_path / "last.ckpt")

        def on_save_checkpoint(self, *args):
            time.sleep(0.1)

    throughput, _ = fitted(tmp_path, Validated(), many(32), callbacks=[Saving()], val_check_interval=4)
    pauses, summary = throughput.summary.pauses, throughput.summary
    assert pauses["validation"] >= 4 * 2 * 0.05 * 0.95
    assert pauses["checkpoint"] >= 4 * 0.1 * 0.95
    assert sum(summary.split.values()) == pytest.approx(1)
    assert summary.units_per_s > 2 / 0.05  # a step that had validation or a save in it would take longer
    assert sum(pauses.values()) < summary.fit_s


def test_figures_reach_loggers_under_lightnings_steps(tmp_path):
    class Logging(Net):
        def training_step(self, batch, index):
            loss = super().training_step(batch, index)
            self.log("train_loss", loss)
            return loss

    logger = CSVLogger(tmp_path)
    throughput = TokenThroughput(warmup_steps=1, table=False, unit="samples")
    made = trainer(tmp_path, callbacks=[throughput], epochs=1)
    made.loggers = [logger]
    made.log_every_n_steps = 8
    made.fit(Logging(), many())
    with open(f"{logger.log_dir}/metrics.csv") as file:
        rows = {}
        for row in csv.DictReader(file):  # one for each that logs
            rows.setdefault(int(row["step"]), {}).update({name: value for name, value in row.items() if value})
    assert [*rows] == [7, 15, 23, 31]
    for row in rows.values():
        assert row["train_loss"]
        for name in ("samples_per_s", "samples_per_s_per_device", "step_ms", "step_p95_ms", "data_ms", "forward_ms"):
            assert float(row[f"throughput/{name}"]) > 0, name


def test_the_progress_bar_shows_it_while_fit_runs(tmp_path):
    from lightning.pytorch.callbacks import TQDMProgressBar

    class Bar(TQDMProgressBar):
        seen = None

        def on_train_batch_end(self, trainer, pl_module, *args):
            self.seen = self.get_metrics(trainer, pl_module)

        def init_train_tqdm(self):
            bar = super().init_train_tqdm()
            bar.disable = True
            return bar

    bar = Bar()
    callbacks = [bar, TokenThroughput(warmup_steps=1, table=False, unit="samples")]
    options = {"enable_progress_bar": True, "log_every_n_steps": 4}
    trainer(tmp_path, callbacks=callbacks, epochs=1, **options).fit(Net(), many())
    assert "samples/s" in bar.seen
    assert "get_metrics" not in vars(bar)


def test_the_trainers_own_profiler_hears_everything(tmp_path):
    profiler = SimpleProfiler()
    _, made = fitted(tmp_path, profiler=profiler)
    assert made.profiler is profiler
    assert len(profiler.recorded_durations["run_training_batch"]) == 32
    assert len(profiler.recorded_durations["[_TrainingEpochLoop].train_dataloader_next"]) >= 32


def test_manual_optimization_is_split(tmp_path):
    class Manual(Net):
        automatic_optimization = False

        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, index):
            optimizer = self.optimizers()
            time.sleep(0.01)
            loss = super().training_step(batch, index)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    throughput, _ = fitted(tmp_path, Manual())
    assert throughput.summary.steps == 30
    split = throughput.summary.split
    assert min(split["backward"], split["optimizer"]) > 0
    assert split["forward"] * mean_step(throughput.summary) > 0.0099


class FakeEvent:
    """Is recorded by a device that is five events behind."""

    made, behind = [], 5

    def __init__(self, enable_timing=False):
        assert enable_timing
        self.time, self.number = None, None

    def record(self):
        self.time, self.number = time.perf_counter(), len(FakeEvent.made)
        FakeEvent.made.append(self)

    def query(self):
        return len(FakeEvent.made) - self.number >= self.behind

    def elapsed_time(self, other):
        assert self.query(), "an event was read before the device came to it"
        assert other.query(), "an event was read before the device came to it"
        return (other.time - self.time) * 1e3

    def synchronize(self):
        raise AssertionError("the host waited")


class Strict(FakeEvent):
    """Lets the host wait at the end of training only."""

    ended = False

    def synchronize(self):
        assert Strict.ended, "the host waited in a step"
        FakeEvent.behind = 0


def test_nothing_waits_in_a_step(tmp_path, monkeypatch):
    class End(Callback):
        def on_train_end(self, *_):
            Strict.ended = True

    FakeEvent.made, FakeEvent.behind, Strict.ended = [], 5, False
    monkeypatch.setattr(torch.cuda, "Event", Strict)
    waits = []
    for name in ("synchronize", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *args, name=name: waits.append(name))
    monkeypatch.setattr("lightning_ups.callbacks.logs.measured_run.clock_for", lambda _: timeline.EventClock())
    throughput = TokenThroughput(warmup_steps=2, table=False, unit="samples", split_every=3)
    trainer(tmp_path, callbacks=[End(), throughput], epochs=1).fit(Net(), many())
    assert throughput.summary.steps == 30
    assert throughput.summary.split_steps == 10
    assert waits == []
    assert len({id(event) for event in FakeEvent.made}) < 60  # of more than 32 + 11 x 10 marks: they are used again


class FakeKernels:
    """Sees a step of 100 microseconds, half of it communication that nothing hides."""

    running = 0

    def start(self):
        FakeKernels.running += 1

    def mark(self):
        pass

    def stop(self):
        FakeKernels.running -= 1
        return [("gemm", 0.0, 100.0), ("ncclDevKernel_AllReduce", 50.0, 200.0)]


@pytest.fixture
def looking(monkeypatch):
    watched = []

    @contextmanager
    def waits(counts):
        watched.append("begin")
        yield counts.update(["model.py:3 (training_step)"])
        watched.append("end")

    FakeKernels.running = 0
    monkeypatch.setattr("lightning_ups.callbacks.logs.listening.Kernels", FakeKernels)
    monkeypatch.setattr("lightning_ups.callbacks.logs.listening.watched_waits", waits)
    monkeypatch.setattr("lightning_ups.callbacks.logs.measured_run.can_look_at", lambda _: True)
    return watched


def test_some_steps_are_looked_at_closely_and_do_not_count(tmp_path, looking):
    throughput, _ = fitted(tmp_path, inspect_at=5)
    summary = throughput.summary
    assert summary.steps == 30 - 5  # four that were looked at, and one that ended it
    assert (summary.inspection.steps, summary.inspection.idle) == (2, 0.0)
    assert summary.inspection.exposed_communication == pytest.approx(0.5)
    assert summary.inspection.waits == (("model.py:3 (training_step)", 1),)
    assert looking == ["begin", "end"]
    assert FakeKernels.running == 0


@pytest.mark.parametrize("last", [7, 8, 9, 10, 11])
def test_a_look_ends_with_training(tmp_path, looking, last):
    throughput, _ = fitted(tmp_path, inspect_at=6, limit_train_batches=last)
    assert FakeKernels.running == 0
    assert looking == ["begin", "end"]
    assert (throughput.summary.inspection is None) == (last < 11)


def test_a_look_that_is_interrupted_is_tried_again(tmp_path, looking):
    class Saving(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, index):
            if index in (6, 10):
                trainer.save_checkpoint(tmp_path / "last.ckpt")

    throughput, _ = fitted(tmp_path, inspect_at=6, callbacks=[Saving()])
    assert throughput.summary.inspection.steps == 2
    assert looking == ["begin", "end"] * 3
    throughput, _ = fitted(tmp_path, inspect_at=3, limit_train_batches=4, epochs=9)
    assert throughput.summary.inspection is None  # no epoch is long enough, and it does not try for ever
    assert len(looking) <= 2 * (3 + 5)


def test_measuring_may_pause(tmp_path):
    class Toggle(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, index):
            {9: throughput.pause, 19: throughput.resume}.get(index, lambda _: None)(trainer)

    throughput = TokenThroughput(warmup_steps=2, table=False, unit="samples")
    made = trainer(tmp_path, callbacks=[Toggle(), throughput], epochs=1)
    profiler = made.profiler
    made.fit(Net(), many())
    assert throughput.summary.units_per_step == 2
    assert throughput.summary.steps == 10 - 2 + 12
    assert made.profiler is profiler


def test_a_slow_loader_is_found_and_named(tmp_path, monkeypatch):
    monkeypatch.setitem(bottlenecks.__globals__, "_LEAST_STEPS", 0)
    throughput, _ = fitted(tmp_path, data=many(40, sleep=0.01))
    change = first_change(throughput.summary)
    assert change.name == "slow loader"
    assert "num_workers=0" in change.what


def test_hooks_of_the_batch_and_callbacks_that_are_slow_are_named(tmp_path, monkeypatch):
    class Encoding(Net):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            time.sleep(0.02)
            return batch

    class Slow(Callback):
        def on_train_batch_end(self, *_):
            time.sleep(0.02)

    monkeypatch.setitem(bottlenecks.__globals__, "_LEAST_STEPS", 0)
    encoding, _ = fitted(tmp_path, Encoding(), many(20))
    assert "is spent in Encoding.on_after_batch_transfer" in first_change(encoding.summary).what
    slow, _ = fitted(tmp_path, data=many(20), callbacks=[Slow()])
    assert "do less after each batch in Slow" in first_change(slow.summary).change


def test_the_table_is_printed_once_at_the_end(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(bottlenecks.__globals__, "_LEAST_STEPS", 0)
    fitted(tmp_path, data=many(40, sleep=0.01), table=True)
    out = capsys.readouterr().out
    assert out.count("samples/s") == 1
    assert "Change first: slow loader" in out
    assert "waiting for data" in out
    assert "FAIL" in out


def test_a_run_within_its_warmup_says_so_in_one_line(tmp_path, capsys, caplog):
    with caplog.at_level("INFO"):
        throughput, _ = fitted(tmp_path, limit_train_batches=3, table=True, warmup_steps=10)
    assert throughput.summary.units_per_s is None
    assert any("fit ended within 10 warm-up steps" in record.message for record in caplog.records)
    assert capsys.readouterr().out == ""


class Takes(Net):
    """Whatever batch it gets, it finds what `Net` wants."""

    def __init__(self, find):
        super().__init__()
        self.find = find

    def training_step(self, batch, index):
        return super().training_step(self.find(batch), index)


def test_a_loader_of_several_may_end_early(tmp_path):
    data = CombinedLoader({"a": many(8), "b": many(16)}, "max_size")
    find = lambda batch: batch["b"] if batch["a"] is None else batch["a"]  # noqa: E731
    throughput, _ = fitted(tmp_path, Takes(find), data)
    assert (throughput.summary.steps, throughput.summary.units_per_step) == (6, 2)
    assert throughput.summary.hints["num_workers"] == 0


@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`")
def test_a_step_may_take_its_batches_itself(tmp_path):
    class Taking(Net):
        def training_step(self, dataloader_iter):
            batch, index, _ = next(dataloader_iter)
            return super().training_step(batch, index)

    throughput, made = fitted(tmp_path, Taking(), many(32, sleep=0.005), epochs=2, peak_tflops=1e-3)
    summary = throughput.summary
    assert (made.global_step, summary.steps, summary.units_per_step) == (32, 30, 2)
    assert summary.split["data"] * mean_step(summary) >= 0.0099
    assert summary.utilisation["mfu"] > 0


def test_a_batch_that_is_skipped_is_no_step(tmp_path):
    class Skipping(Net):
        def on_train_batch_start(self, batch, index):
            return -1 if index == 5 else None

    throughput, made = fitted(tmp_path, Skipping(), epochs=2)
    summary = throughput.summary
    assert (made.global_step, summary.steps, summary.units_per_step) == (10, 8, 2)


def test_what_lies_between_epochs_is_timed(tmp_path):
    class Slow(Net):
        def on_save_checkpoint(self, checkpoint):
            time.sleep(0.1)

        def on_train_epoch_end(self):
            time.sleep(0.05)

    save = ModelCheckpoint(dirpath=tmp_path / "saved")
    throughput = TokenThroughput(unit="samples", warmup_steps=2, table=False)
    options = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    made = Trainer(callbacks=[throughput, save], max_epochs=3, default_root_dir=tmp_path, **options)
    made.fit(Slow(), many(8))
    summary = throughput.summary
    assert summary.steps == 3 * 4 - 2
    assert summary.pauses["checkpoint"] >= 0.3
    assert summary.between_s >= 0.15
    assert summary.pauses["checkpoint"] + summary.between_s < summary.fit_s
    assert "slow checkpoints" in [each.name for each in bottlenecks(summary)]


def test_an_interrupted_run_has_its_figures(tmp_path, capsys):
    class Interrupted(Net):
        def training_step(self, batch, index):
            if index == 10:
                raise KeyboardInterrupt
            return super().training_step(batch, index)

    throughput = TokenThroughput(unit="samples", warmup_steps=2)
    manifest = RunManifest()
    with pytest.raises(SystemExit):
        trainer(tmp_path, callbacks=[throughput, manifest], epochs=1).fit(Interrupted(), many())
    assert (throughput.summary.steps, throughput.summary.units_per_step) == (8, 2)
    assert "8 steps after a warm-up of 2" in capsys.readouterr().out


def test_the_manifest_keeps_it_without_any_declaration(tmp_path):
    manifest = RunManifest()
    throughput, _ = fitted(tmp_path, data=many(16), callbacks=[manifest])
    assert manifest.manifest["report"]["TokenThroughput"]["units_per_s"] == throughput.summary.units_per_s


def test_fast_dev_run_is_left_alone(tmp_path, capsys):
    throughput = TokenThroughput()
    trainer(tmp_path, callbacks=[throughput], fast_dev_run=2).fit(Net(), many())
    assert throughput.summary is None
    assert "hroughput" not in capsys.readouterr().out


def test_flops_and_peaks_make_mfu(tmp_path):
    throughput, _ = fitted(tmp_path, peak_tflops=1e-3)
    summary = throughput.summary
    # Three blocks of 8-32-8 and a head of 8-1; the first product needs no gradient of its input.
    by_hand = 2 * (3 * 2 * 8 * 32 * 3 - 8 * 32 + 3 * 8)
    assert summary.flops.model == by_hand
    assert summary.utilisation["mfu"] == pytest.approx(summary.units_per_s * by_hand / 1e9)
    assert summary.utilisation["hfu"] == summary.utilisation["mfu"]


def test_a_device_that_is_not_known_has_no_mfu(tmp_path):
    throughput, _ = fitted(tmp_path)
    assert throughput.summary.utilisation == {}
    assert "peak of 'cpu' is not known" in throughput.summary.why_no_mfu


def test_what_cannot_be_counted_is_said(tmp_path, caplog):
    class Picky(Net):
        def training_step(self, batch, index):
            batch = batch[batch.sum(1).nonzero()[:, 0]]
            return super().training_step(batch, index)

    throughput, _ = fitted(tmp_path, Picky(), peak_tflops=1.0)
    assert throughput.summary.utilisation == {}
    assert "give flops_per_unit" in throughput.summary.why_no_mfu


def test_flops_may_be_given(tmp_path):
    throughput, _ = fitted(tmp_path, peak_tflops={"fp32": 1e-3, "tf32": 1e-3}, flops_per_unit=1e3)
    assert throughput.summary.utilisation["mfu"] == pytest.approx(throughput.summary.units_per_s * 1e3 / 1e9)


def test_a_count_may_be_a_function_or_a_tensor(tmp_path):
    throughput, _ = fitted(tmp_path, unit="points", count=lambda batch: torch.tensor(batch.shape[0] * 3))
    assert (throughput.summary.unit, throughput.summary.units_per_step) == ("points", 6)


def test_a_second_fit_measures_anew(tmp_path):
    throughput = TokenThroughput(warmup_steps=2, table=False, unit="samples")
    made = trainer(tmp_path, callbacks=[throughput], epochs=1)
    net = Net()
    made.fit(net, many(20))
    first = throughput.summary
    made.fit_loop.max_epochs = 3
    made.fit(net, many(40))
    assert first.steps == 8
    assert throughput.summary is not first
    assert throughput.summary.steps == 2 * 20 - 2


class Validated(Net):
    def validation_step(self, batch, index): ...


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize(
    ("accumulate", "steps", "batches"),
    [(1, 5, 5), (2, 4, 6)],  # of batches in pairs, one has none with a loss, and two have one of two
)
def test_a_batch_that_the_step_leaves_out_does_not_count(tmp_path, accumulate, steps, batches):
    class Leaving(Net):
        def training_step(self, batch, index):
            return None if index in (2, 4, 5, 7) else super().training_step(batch, index)

    settings = {"accumulate_grad_batches": accumulate, "warmup_steps": 0}
    throughput, _ = fitted(
        tmp_path, Leaving(), many(40, batch_size=4), limit_train_batches=9 + accumulate - 1, **settings
    )
    summary = throughput.summary
    assert summary.steps == steps
    assert summary.units_per_step * summary.steps == pytest.approx(4 * batches)


def test_an_exception_leaves_the_trainer_as_it_was(tmp_path):
    throughput = TokenThroughput()
    made = trainer(tmp_path, callbacks=[throughput])
    profiler = made.profiler
    with pytest.raises(RuntimeError, match="stop here"):
        made.fit(Net(fail=True), loader())
    assert made.profiler is profiler


@pytest.mark.parametrize(
    ("settings", "cure"),
    [
        ({"warmup_steps": -1}, "Use 0 or more"),
        ({"inspect_at": 0}, "Use 1 or more"),
        ({"split_every": 0}, "Use 1 or more"),
        ({"unit": "frames"}, "needs count"),
        ({"peak_tflops": {"bf17": 1.0}}, "peak_tflops"),
        ({"peak_tflops": 0.0}, "peak_tflops"),
    ],
)
def test_wrong_settings_are_refused(settings, cure):
    with pytest.raises(ValueError, match=cure):
        TokenThroughput(**settings)


def test_a_batch_without_tokens_is_refused(tmp_path):
    with pytest.raises(ValueError, match="count=a function of the batch"):
        fitted(tmp_path, unit="tokens")


def two_ranks(folder):
    torch.manual_seed(0)
    throughput = TokenThroughput(warmup_steps=2, table=False, unit="samples")
    trainer(folder, callbacks=[throughput], epochs=1, strategy="ddp", devices=2).fit(Net(), many())
    summary = throughput.summary
    assert summary.num_devices == 2
    assert len(summary.ranks) == 2
    assert summary.units_per_step == 4
    assert summary.units_per_s == pytest.approx(2 * summary.units_per_s_per_device)
    return summary.steps


def test_ranks_add_up(ranks, tmp_path):
    assert ranks(two_ranks, str(tmp_path)) == 14


def sharded(folder):
    from lightning_ups.strategies import FSDP2Strategy

    torch.manual_seed(0)
    throughput = TokenThroughput(warmup_steps=2, table=False, unit="samples", peak_tflops=1e-3)
    trainer(folder, callbacks=[throughput], epochs=1, strategy=FSDP2Strategy(), devices=2).fit(Net(), many())
    return throughput.summary.flops.model


def test_a_sharded_module_is_counted_whole(ranks, tmp_path):
    assert ranks(sharded, str(tmp_path)) == 2 * (3 * 2 * 8 * 32 * 3 - 8 * 32 + 3 * 8)


class NoOptimizer(Net):
    def configure_optimizers(self):
        raise RuntimeError("no optimizer")


class NotSane(Net):
    def validation_step(self, batch, index):
        raise RuntimeError("not sane")

    def val_dataloader(self):
        return many(4)


@pytest.mark.parametrize("module", [NoOptimizer(), NotSane(), None], ids=["optimizer", "sanity", "no batches"])
def test_a_second_fit_that_does_not_train_has_no_figures(tmp_path, module):
    throughput = TokenThroughput(warmup_steps=2, table=False, unit="samples")
    trainer(tmp_path, callbacks=[throughput], epochs=1).fit(Net(), many(20))
    assert throughput.summary is not None
    made = trainer(tmp_path, callbacks=[throughput], epochs=1, limit_train_batches=0 if module is None else 1.0)
    made.validate(Validated(), many(4), verbose=False)
    assert throughput.summary is not None, "of the last fit"
    if module is None:
        made.fit(Net(), many(20))
    else:
        with pytest.raises(RuntimeError, match=r"no optimizer|not sane"):
            made.fit(module, many(20))
    assert throughput.summary is None


@dataclass
class Batch:
    x: torch.Tensor


class Opaque:
    def __init__(self, x):
        self.x = x


@pytest.mark.parametrize(
    ("made", "find", "unit", "units"),
    [
        (lambda x: {"observation.state": x}, lambda batch: batch["observation.state"], "samples", 2),
        (Batch, lambda batch: batch.x, "samples", 2),
        (Opaque, lambda batch: batch.x, "batches", 1),
    ],
    ids=["dotted name", "dataclass", "unknown"],
)
def test_whatever_a_batch_is_training_goes_on(tmp_path, made, find, unit, units):
    data = DataLoader(Many(16), batch_size=2, collate_fn=lambda rows: made(torch.stack(rows)))
    throughput, _ = fitted(tmp_path, Takes(find), data, unit="auto")
    summary = throughput.summary
    assert (summary.unit, summary.units_per_step, summary.steps) == (unit, units, 6)


@pytest.mark.parametrize("peak", [{"fp8": 1.0}, 1.0])
def test_a_peak_of_another_type_is_no_peak(tmp_path, peak):
    class Double(Net):
        def __init__(self):
            super().__init__()
            self.double()

        def training_step(self, batch, index):
            return super().training_step(batch.double(), index)

    throughput, _ = fitted(tmp_path, Double(), many(16), peak_tflops=peak)
    if isinstance(peak, float):
        assert throughput.summary.utilisation["mfu"] > 0
    else:
        assert throughput.summary.utilisation == {}
        assert "in float64 is not known; give peak_tflops as a number" in throughput.summary.why_no_mfu
        throughput, _ = fitted(tmp_path, data=many(16), peak_tflops=peak)
        assert throughput.summary.utilisation == {}
        assert "computes in fp32, which peak_tflops does not have" in throughput.summary.why_no_mfu


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_first_step_that_computes_nothing_has_no_mfu(tmp_path):
    class Late(Net):
        def training_step(self, batch, index):
            return super().training_step(batch, index) if index else None

    throughput, _ = fitted(tmp_path, Late(), peak_tflops=1.0)
    assert throughput.summary.utilisation == {}
    assert "no products that can be counted; give flops_per_unit" in throughput.summary.why_no_mfu


def test_a_first_batch_of_no_units_is_said(tmp_path):
    throughput, _ = fitted(tmp_path, peak_tflops=1.0, unit="points", count=lambda batch: 0)
    assert "the first batch holds no points" in throughput.summary.why_no_mfu


@pytest.mark.parametrize(
    ("found", "what"), [(None, "None, a NoneType"), (torch.ones(3), r"a tensor \[3\]"), (np.ones(3), r"an array \[3\]")]
)
@pytest.mark.parametrize("peak", [None, 1.0])
def test_a_count_that_is_no_number_is_refused(tmp_path, found, what, peak):
    with pytest.raises(ValueError, match=rf"returned {what}.*Return a number"):
        fitted(tmp_path, peak_tflops=peak, unit="points", count=lambda batch: found)


class Raw(Net):
    """Steps an optimizer past Lightning, which counts no step of it."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, index):
        self.manual_backward(super().training_step(batch, index))
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.step()
        optimizer.zero_grad()


def test_steps_that_lightning_does_not_hear_of_count(tmp_path):
    throughput, made = fitted(tmp_path, Raw())
    assert made.global_step == 0
    assert (throughput.summary.steps, throughput.summary.units_per_step) == (32 - 2, 2)


LOGGED = {"epochs": 1, "log_every_n_steps": 5}


def test_the_time_of_each_step_is_written_next_to_the_logs(tmp_path):
    throughput = TokenThroughput(unit="samples", warmup_steps=2, table=False)
    manifest = RunManifest()
    made = trainer(tmp_path, callbacks=[throughput, manifest], logger=CSVLogger(tmp_path, name=None), **LOGGED)
    made.fit(Net(), many(20))
    with (tmp_path / "version_0/step_times.csv").open() as file:
        rows = [*csv.DictReader(file)]
    assert [int(row["step"]) for row in rows] == [*range(2, 10)]
    assert np.median([float(row["step_ms"]) for row in rows]) == pytest.approx(
        1e3 * throughput.summary.step_s, rel=1e-4
    )
    made.fit_loop.max_epochs = 2
    made.fit(Net(), many(20))  # continues at step 10
    assert (tmp_path / "version_0/step_times-2.csv").read_text().splitlines()[1].startswith("12,")
    assert manifest.manifest["report"]["TokenThroughput"]["step_times"] == "step_times-2.csv"


def test_without_a_logger_no_step_times_are_written(tmp_path):
    _, made = fitted(tmp_path)
    assert made.log_dir == str(tmp_path)
    assert not [*tmp_path.rglob("step_times*")]


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path, monkeypatch):
    throughput = TokenThroughput(unit="samples", warmup_steps=2, table=False)

    def full(*_, **__):
        raise OSError("no space")

    monkeypatch.setattr("lightning_ups.callbacks.logs.token_throughput.reserve", full)
    made = trainer(tmp_path, callbacks=[throughput], logger=CSVLogger(tmp_path, name=None), **LOGGED)
    with pytest.warns(UserWarning, match=r"could not write step_times.csv to .*version_0: no space"):
        made.fit(Net(), many(20))
    assert throughput.summary.step_s is not None
