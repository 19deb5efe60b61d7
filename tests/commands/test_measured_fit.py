"""The fit of a trial, in this process; the engine's tests cover its process."""

import json
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader, IterableDataset

from lightning_ups.__main__ import main
from lightning_ups.callbacks import TokenThroughput
from lightning_ups.commands.measured_fit import Stopwatch
from lightning_ups.insight.tune import Configuration, Effort, Engine, Result
from tests import cli_toys


class Full(cli_toys.Toy):
    """Finds no memory."""

    def training_step(self, batch, _):
        raise torch.OutOfMemoryError("out of memory on purpose")


class Cycled(cli_toys.Toy):
    """Reads the length of the run, and has a schedule that ends with it."""

    seen, rates = (), ()

    def configure_optimizers(self):
        length = self.trainer.estimated_stepping_batches
        Cycled.seen, Cycled.rates = (length, self.trainer.max_epochs, self.trainer.max_steps), []
        optimizer = super().configure_optimizers()
        if length in (-1, float("inf")):
            return optimizer
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=length)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def on_train_batch_start(self, batch, index):
        Cycled.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        if not self.trainer.max_epochs == self.trainer.max_steps == -1:  # the run is not past its own end
            assert Cycled.seen[1:] == (self.trainer.max_epochs, self.trainer.max_steps)


class Bringing(Cycled):
    """Brings callbacks that write into a folder of the user, and that end the run."""

    def configure_callbacks(self):
        saving = ModelCheckpoint("precious", filename="best", every_n_train_steps=1)
        return [EarlyStopping("no_such_loss"), saving, Marking()]


class Manual(Cycled):
    """Optimizes by itself."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, index):
        self.optimizers().zero_grad()
        self.manual_backward(self.loss(batch))
        self.optimizers().step()
        self.lr_schedulers().step()


class Scheduled(cli_toys.Toy):
    """Its learning rate changes every three batches that end an optimizer step."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "frequency": 3}]


class Endless(cli_toys.Data):
    """Has no length."""

    def train_dataloader(self):
        return DataLoader(Stream(self.size))


class Once(cli_toys.Data):
    """Is a stream that can be read once."""

    def train_dataloader(self):
        batches = iter(torch.randn(5, 4, 8))
        return DataLoader(Stream(batches), batch_size=None)


class Stream(IterableDataset):
    def __init__(self, size):
        self.size = size

    def __iter__(self):
        return iter(torch.randn(self.size, 8)) if isinstance(self.size, int) else self.size


class Marking(Callback):
    """A user's callback that takes part."""

    steps = 0

    def on_train_batch_end(self, *_):
        Marking.steps += 1


def settings(model="tests.cli_toys.Toy", **trainer):
    callbacks = [
        {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint"},
        {"class_path": "lightning.pytorch.callbacks.LearningRateMonitor"},
        {"class_path": "EarlyStopping", "init_args": {"monitor": "val_loss"}},
        {"class_path": f"{__name__}.Marking"},
    ]
    return {
        "model": {"class_path": model},
        "data": {"class_path": "tests.cli_toys.Data", "init_args": {"size": 16}},
        "trainer": {"accelerator": "cpu", "max_steps": 7, "callbacks": callbacks, **trainer},
    }


def measured(tmp_path, monkeypatch, given, *words, code=0, seconds=0.2):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "result"
    folder.mkdir()
    options = ["--folder", str(folder), "--seconds", str(seconds)]
    try:
        assert main(["measured_fit", *options, "--config", yaml.safe_dump(given), *words]) == code
    except (KeyError, RuntimeError):  # of the user's code
        assert code == 1
    assert [path.name for path in tmp_path.iterdir()] == ["result"]
    failures = [*folder.glob("failure-*.json")]
    return Result.of(json.loads((failures[0] if failures else folder / "result.json").read_text()))


@pytest.mark.filterwarnings("ignore")
def test_a_fit_is_measured_and_leaves_no_files(tmp_path, monkeypatch):
    Marking.steps = 0
    found = measured(tmp_path, monkeypatch, settings(accumulate_grad_batches=2), seconds=2)
    assert found.failure is None
    assert found.samples_per_s * found.step_s == pytest.approx(8, rel=0.9)  # two batches of four in a step
    assert found.tokens_per_s is None
    assert found.steps >= 2
    assert len(found.losses) == min(8, found.steps + found.warmup)
    assert found.peak_bytes > 2**20
    assert found.start_s > 0
    assert (found.device, found.devices) == ("cpu", 1)
    assert Marking.steps == 2 * (found.steps + found.warmup), "two batches a step; the user's callbacks run"


@pytest.mark.filterwarnings("ignore")
def test_callbacks_of_the_module_neither_write_nor_end_the_trial(tmp_path, monkeypatch):
    Marking.steps = 0
    found = measured(tmp_path, monkeypatch, settings(f"{__name__}.Bringing"))
    assert found.failure is None
    assert found.steps + found.warmup >= 8
    assert Marking.steps > 0, "its other callbacks run"


@pytest.mark.filterwarnings("ignore")
def test_a_trial_ends_with_a_stream_that_can_be_read_once(tmp_path, monkeypatch):
    given = settings(max_steps=-1, max_epochs=1)
    given["data"] = {"class_path": f"{__name__}.Once"}
    found = measured(tmp_path, monkeypatch, given)
    assert found.steps + found.warmup == 5


class Compiling(cli_toys.Toy):
    """Takes long in its first three steps, as with compilation and the capture of CUDA graphs."""

    def training_step(self, batch, index):
        time.sleep(0.4 if self.trainer.global_step < 3 else 0.01)
        return super().training_step(batch, index)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [[], ["--floor", "40"]])
def test_slow_steps_at_the_start_do_not_count(tmp_path, monkeypatch, options):
    found = measured(tmp_path, monkeypatch, settings(f"{__name__}.Compiling"), *options, seconds=0.3)
    assert not found.is_pruned
    assert found.step_s < 0.1
    assert found.samples_per_s > 4 / 0.1


@pytest.mark.filterwarnings("ignore")
def test_losses_are_those_of_the_batch_whatever_is_accumulated(tmp_path, monkeypatch):
    losses = []
    for count in (1, 4):
        folder = tmp_path / str(count)
        folder.mkdir()
        given = settings(accumulate_grad_batches=count)
        given["data"] = {"class_path": "tests.insight.tune.injected.Sized"}  # all batches are equal
        losses.append(measured(folder, monkeypatch, given).losses)
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-3)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("trainer", "seen"),
    [
        ({"max_steps": 3}, (3, None, 3)),
        ({"max_steps": -1, "max_epochs": 2}, (8, 2, -1)),
        ({"max_steps": 5, "max_epochs": 2}, (5, 2, 5)),
        ({"max_steps": -1, "max_epochs": 3, "limit_train_batches": 0.5}, (6, 3, -1)),
        ({"max_steps": -1, "max_epochs": 3, "overfit_batches": 2, "accumulate_grad_batches": 2}, (3, 3, -1)),
        ({"max_steps": -1, "max_time": "00:00:01:00"}, (float("inf"), -1, -1)),
        ({"max_steps": -1}, (4000, None, -1)),
    ],
)
def test_user_code_sees_the_length_of_the_run_and_a_short_one_goes_on(tmp_path, monkeypatch, trainer, seen):
    seconds = 60 if seen[0] < 100 else 0.2
    found = measured(tmp_path, monkeypatch, settings(f"{__name__}.Cycled", **trainer), seconds=seconds)
    assert found.failure is None, found.text
    length, epochs, steps = Cycled.seen
    assert (length, steps) == (seen[0], seen[2])
    assert epochs == (seen[1] or (-1 if steps > 0 else 1000)), "Lightning's defaults"
    if length < 100:
        assert found.steps + found.warmup >= 8
        last = length * trainer.get("accumulate_grad_batches", 1) - 1
        assert len({*Cycled.rates[last + 1 :]}) == 1, "the schedule has ended with the run"
        assert len({*Cycled.rates[: last + 1]}) > 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("steps", [3, 15])
def test_a_trial_ends_with_the_run_if_enough_steps_are_timed(tmp_path, monkeypatch, steps):
    given = settings(f"{__name__}.Manual", max_steps=steps, callbacks=[])
    given["data"] = {"class_path": f"{__name__}.Endless", "init_args": {"size": 64}}
    found = measured(tmp_path, monkeypatch, given, seconds=60)
    assert found.failure is None, found.text
    assert len(Cycled.rates) == {3: 9, 15: 15}[steps]


@pytest.mark.filterwarnings("ignore")
def test_mfu_is_of_the_measured_rate_where_the_peak_is_known(tmp_path, monkeypatch):
    start = Stopwatch.on_train_start

    def with_peak(self, trainer, pl_module):
        start(self, trainer, pl_module)
        self._count_flops(trainer, TokenThroughput(inspect_at=None, table=False, progress_bar=False, peak_tflops=1e-6))

    monkeypatch.setattr(Stopwatch, "on_train_start", with_peak)
    found = measured(tmp_path, monkeypatch, settings())
    products = (
        2 * 2 * (8 * 8) * 3 - 8 * 8
    )  # 4 layers of 8 x 8, backward twice forward; the first needs no input gradient
    assert found.mfu == pytest.approx(found.samples_per_s * 2 * products / 1e6, rel=0.01)


@pytest.mark.filterwarnings("ignore")
def test_the_memory_of_recorded_graphs_counts_once(tmp_path, monkeypatch):
    class Memory:
        """Recording took 900 bytes in the first steps, of which 500 stay reserved; replays take 300 besides."""

        now = 900

        def peak(self):
            return self.now

        def reset_peak(self):
            self.now = 300

        def recorded(self):
            return 500

    start = Stopwatch.on_train_start

    def with_memory(self, trainer, pl_module):
        start(self, trainer, pl_module)
        self._memory = Memory()

    monkeypatch.setattr(Stopwatch, "on_train_start", with_memory)
    assert measured(tmp_path, monkeypatch, settings(max_steps=-1)).peak_bytes == 900


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("batches", "steps"), [(1, 3), (2, 3), (3, 1)])
def test_a_schedule_is_known_in_optimizer_steps(tmp_path, monkeypatch, batches, steps):
    given = settings(f"{__name__}.Scheduled", accumulate_grad_batches=batches)
    assert measured(tmp_path, monkeypatch, given).schedules == [steps]


@pytest.mark.filterwarnings("ignore")
def test_a_trial_far_below_the_floor_ends_early(tmp_path, monkeypatch):
    found = measured(tmp_path, monkeypatch, settings(), "--floor", "1e9", seconds=100)
    assert found.is_pruned
    assert found.steps < 20


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("given", "words", "code", "kind", "part"),
    [
        (settings(f"{__name__}.Full"), [], 1, "out of memory", "on purpose"),
        (settings(), ["--model.fail", "step"], 1, "crash", "the user's own error"),
        (settings(), ["--trainer.callbacks+=Compile", "--trainer.callbacks.blocks=[none.*]"], 2, "refused", "none"),
        (settings(), ["--trainer.devises", "2"], 2, "refused", "devices"),
    ],
)
def test_failures_are_kept_with_their_kind(tmp_path, monkeypatch, given, words, code, kind, part):
    found = measured(tmp_path, monkeypatch, given, *words, code=code)
    assert found.failure == kind
    assert part in found.text


@pytest.mark.filterwarnings("ignore")
def test_steps_of_epochs_of_one_step_contain_the_end_of_an_epoch(tmp_path, monkeypatch):
    given = settings()
    given["data"]["init_args"]["size"] = 4
    found = measured(tmp_path, monkeypatch, given, seconds=60)
    assert found.failure is None, found.text
    assert found.steps >= 4


def test_a_trial_in_its_own_process(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(settings()))
    python = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
    python += "from lightning_ups.__main__ import main\nsys.exit(main(['measured_fit', *sys.argv[1:]]))"
    with Engine(command=[sys.executable, "-c", python]) as engine:
        configuration = Configuration(words=["--config", str(file)], fragments=["model: {init_args: {width: 16}}"])
        found = engine.run(configuration, Effort(seconds=0.2))
    assert found.failure is None, found.text
    assert found.samples_per_s > 0
    assert found.start_s > 1, "from the start of the process"


@pytest.mark.slow
def test_a_trial_whose_command_was_killed_ends_itself(tmp_path):
    python = "import sys, time\nfrom lightning_ups.commands import measured_fit\n"
    python += "from pathlib import Path\noptions = dict(seconds=1, precision=0.1, floor=0, began=0, limit=-6)\n"
    python += f"measured_fit.measure(lambda arrange: time.sleep(100), folder=Path({str(tmp_path)!r}), **options)\n"
    with Engine() as engine:
        code, output = engine.call([sys.executable, "-c", python], limit=90)
    assert code == 1, output
    assert "Timeout" in output
