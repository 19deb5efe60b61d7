"""Each injected problem is named first, and healthy runs have none."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader

from lightning_ups.insight.diagnose import Probe, findings
from lightning_ups.insight.diagnose.probe import _idle
from lightning_ups.insight.throughput import Inspection
from tests.insight.diagnose.injectors import ON_GPU, ROWS, Rows, Work, diagnosed, parts, parts_on_gpu
from tests.toys import Net, loader, trainer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
ATTEMPTS = 3  # other load on the machine looks like a problem
PROBLEMS = ("slow loader", "recompilations", "CPU-bound optimizer", "excessive logging", "checkpoint stalls")


@pytest.mark.slow
@pytest.mark.parametrize("problem", PROBLEMS)
def test_an_injected_problem_is_named_first(tmp_path, problem):
    for attempt in range(ATTEMPTS):
        module, data, options = parts(problem, tmp_path / str(attempt))
        found = findings(diagnosed(module, data, tmp_path, **options))
        if found and found[0].name == problem and 0.05 < found[0].lost < 0.5:
            return
    raise AssertionError(found or "nothing stands out")


def on_two_ranks(folder):
    module, data, options = parts("uneven ranks", folder)
    facts = diagnosed(module, data, folder, strategy="ddp", devices=2, num_nodes=1, **options)
    return [(each.name, each.lost, each.sentence) for each in findings(facts)]


@pytest.mark.slow
def test_uneven_ranks_are_named_first(ranks, tmp_path):
    for _ in range(ATTEMPTS):
        found = ranks(on_two_ranks, str(tmp_path))
        if found and found[0][0] == "uneven ranks" and 0.05 < found[0][1] < 0.5 and "rank 1" in found[0][2]:
            return
    raise AssertionError(found)


class Products(LightningModule):
    """Matrix products of some size."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(512, 512) for _ in range(3)))

    def training_step(self, batch, _):
        return self.layers(batch.flatten(0, 1)).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), fused=True)


class Longer(Rows):
    row = torch.ones(128, 512)

    def __getitem__(self, index):
        return self.row


HEALTHY = {
    "a step that waits": lambda: (Work(), DataLoader(Rows(), batch_size=ROWS), {}),
    "matrix products": lambda: (Products(), DataLoader(Longer(), batch_size=8), {}),
    "accumulation": lambda: (Work(), DataLoader(Rows(), batch_size=ROWS), {"accumulate_grad_batches": 4}),
}


@pytest.mark.slow
@pytest.mark.parametrize("make", HEALTHY.values(), ids=HEALTHY)
def test_nothing_stands_out_in_a_healthy_run(tmp_path, make):
    for _ in range(ATTEMPTS):
        module, data, options = make()
        found = findings(diagnosed(module, data, tmp_path, **options))
        if not found:
            return
    raise AssertionError(found)


@pytest.mark.gpu(capability=(8, 0))
@pytest.mark.parametrize("problem", ON_GPU)
def test_a_problem_on_a_gpu_is_named_first(tmp_path, problem):
    module, data, options = parts_on_gpu(problem)
    found = findings(diagnosed(module, data, tmp_path, seconds=3.0, devices=1, **options))
    assert (found[0].name if found else "nothing") == problem, found


def test_the_trainer_is_as_before_and_an_experiment_that_fails_costs_one_row(tmp_path):
    class Fails(Net):
        def training_step(self, batch, index):
            if len(batch) > 4:
                raise RuntimeError("no memory for that")
            return super().training_step(batch, index)

    rows, run = [], trainer(tmp_path, epochs=1000, callbacks=[Probe(lambda row: rows.append(row), seconds=0.2)])
    run.fit(module := Fails(), loader(4))
    ended = {row["end"]: row for row in rows if "end" in row}
    assert ended["batches"]["error"] == "RuntimeError: no memory for that"
    assert ended["all"]
    assert "log" not in vars(module)
    assert type(run.profiler).__name__ == "PassThroughProfiler"


def test_a_fit_that_ends_early_says_so(tmp_path):
    rows = []
    trainer(tmp_path, epochs=1, callbacks=[Probe(lambda row: rows.append(row))]).fit(Net(), loader(4))
    assert rows[-1]["error"] == "training ended after 2 steps"


def test_a_fix_is_tried_on_loaders_and_optimizers(tmp_path):
    seen = []

    class Seen(Net):
        def train_dataloader(self):
            return DataLoader(torch.randn(8, 8), 4, False)

        def on_train_batch_start(self, *_):
            seen.append((self.trainer.train_dataloader.batch_size, self.optimizers().param_groups[0]["lr"]))

    probe = Probe(lambda _: None, loader={"batch_size": 2}, optimizer={"lr": 0.5}, only_steps=True, seconds=0.1)
    trainer(tmp_path, epochs=1000, callbacks=[probe]).fit(Seen())
    assert {*seen} == {(2, 0.5)}
    assert DataLoader([1], 4).batch_size == 4


@pytest.mark.parametrize(
    ("step_s", "idle"),
    [(0.0, 0.3), (0.010, 0.3), (0.0078, 0.1), (0.006, 0.0)],
    ids=["unknown", "same", "slower", "busy"],
)
def test_gaps_that_the_profiler_made_are_no_idle_time(step_s, idle):
    seen = Inspection(steps=2, seconds=0.010, idle=0.3)  # 7 ms of kernels
    assert _idle(seen, step_s=step_s) == pytest.approx(idle, abs=0.005)
