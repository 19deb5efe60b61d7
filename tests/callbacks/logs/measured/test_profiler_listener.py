import pytest
from lightning.pytorch.profilers import PassThroughProfiler, SimpleProfiler

from lightning_ups.callbacks.logs.measured.profiler_listener import ProfilerListener


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


def test_an_exception_ends_a_phase(heard):
    with pytest.raises(KeyError), listener(heard).profile("save_checkpoint"):
        raise KeyError
    assert heard == ["checkpoint", "end"]


def test_the_inner_profiler_hears_all_and_is_described(heard):
    inner = SimpleProfiler()
    outer = listener(heard, inner)
    with outer.profile("save_checkpoint"), outer.profile("run_training_batch"):
        pass
    assert {"save_checkpoint", "run_training_batch"} <= set(inner.recorded_durations)
    assert "save_checkpoint" in outer.summary()


def test_two_leave_nothing_whoever_goes_first():
    class Trainer:
        profiler = stock = SimpleProfiler()

    for first, second in ((0, 1), (1, 0)):
        ends = ([], [])
        both = [ProfilerListener.install(Trainer, enter=end.append, leave=lambda: None) for end in ends]
        both[first].remove(Trainer)
        with Trainer.profiler.profile("save_checkpoint"):
            pass
        assert (ends[first], ends[second]) == ([], ["checkpoint"])
        both[second].remove(Trainer)
        assert Trainer.profiler is Trainer.stock
    assert len(Trainer.stock.recorded_durations["save_checkpoint"]) == 2


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
