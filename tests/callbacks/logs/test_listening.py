from contextlib import contextmanager

import pytest
import torch
from lightning.pytorch.profilers import PassThroughProfiler, SimpleProfiler

from lightning_ups.callbacks.logs import listening
from lightning_ups.callbacks.logs.listening import CloseLook, ProfilerListener, can_look_at


@pytest.fixture
def heard():
    return []


def listener(heard, inner=None):
    return ProfilerListener(inner or PassThroughProfiler(), enter=heard.append, leave=lambda: heard.append("end"))


@pytest.mark.parametrize(
    ("action", "phase"),
    [
        ("[_TrainingEpochLoop].train_dataloader_next", "data"),
        ("[Strategy]DDPStrategy.batch_to_device", "transfer"),
        ("[Strategy]FSDP2Strategy.training_step", "forward"),
        ("[Strategy]SingleDeviceStrategy.backward", "backward"),
        ("[LightningModule]Net.optimizer_step", "optimizer"),
        ("optimizer_step", "optimizer"),
        ("save_checkpoint", "checkpoint"),
    ],
)
def test_phases_are_heard(heard, action, phase):
    with listener(heard).profile(action):
        heard.append("inside")
    assert heard == [phase, "inside", "end"]


@pytest.mark.parametrize(
    "action",
    [
        "run_training_batch",
        "[_EvaluationLoop].val_next",
        "[Strategy]DDPStrategy.validation_step",
        "[Callback]Progress.on_train_batch_start",
        "[LightningModule]Net.optimizer_zero_grad",
    ],
)
def test_other_actions_are_not(heard, action):
    with listener(heard).profile(action):
        pass
    assert heard == []


def test_the_end_of_validation_is_told_by_another(heard):
    with listener(heard).profile("[LightningModule]Net.on_validation_model_zero_grad"):
        pass
    assert heard == ["validation"]


def test_the_inner_profiler_hears_all_and_is_described(heard):
    inner = SimpleProfiler()
    outer = listener(heard, inner)
    with outer.profile("save_checkpoint"), outer.profile("run_training_batch"):
        pass
    assert {"save_checkpoint", "run_training_batch"} <= set(inner.recorded_durations)
    assert "save_checkpoint" in outer.summary()


def test_another_profiler_in_its_place_stays():
    class Trainer:
        profiler = PassThroughProfiler()

    trainer, stock = Trainer(), Trainer.profiler
    first = ProfilerListener.install(trainer, enter=print, leave=print)
    assert trainer.profiler is first
    first.remove(trainer)
    assert trainer.profiler is stock
    trainer.profiler = other = SimpleProfiler()
    first.remove(trainer)
    assert trainer.profiler is other


@pytest.fixture
def seen(monkeypatch):
    events = []

    class Kernels:
        def start(self):
            events.append("kernels")

        def mark(self):
            events.append("mark")

        def stop(self):
            events.append("end of kernels")
            return [("gemm", 0.0, 60.0), ("gemm", 80.0, 100.0)]

    @contextmanager
    def waits(counts):
        events.append("waits")
        counts["a.py:1 (step)"] += 3
        yield
        events.append("end of waits")

    monkeypatch.setattr(listening, "Kernels", Kernels)
    monkeypatch.setattr(listening, "watched_waits", waits)
    return events


def test_waits_come_first_and_kernels_after(seen):
    found = []
    look = CloseLook(found.append)
    assert seen == ["waits"]
    look = look.next()
    assert seen[1:] == ["end of waits", "kernels"]
    look = look.next()
    assert seen[3:] == ["mark"]  # ranks have met
    look = look.next()
    assert look is not None
    assert look.next() is None
    assert seen[4:] == ["mark", "end of kernels"]
    assert found[0].idle == pytest.approx(0.2)
    assert found[0].seconds == pytest.approx(50e-6)
    assert found[0].waits == (("a.py:1 (step)", 3),)


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_a_look_may_end_early(seen, steps):
    found = []
    look = CloseLook(found.append)
    for _ in range(steps):
        look = look.next()
    look.cancel()
    look.cancel()
    assert found == []
    assert seen.count("waits") == seen.count("end of waits") == 1
    assert seen.count("kernels") == seen.count("end of kernels")


def test_only_gpus_can_be_looked_at_and_by_one(monkeypatch):
    assert not can_look_at(torch.device("cpu"))
    assert can_look_at(torch.device("cuda"))
    monkeypatch.setattr(listening, "is_profiled", lambda: True)
    assert not can_look_at(torch.device("cuda"))
