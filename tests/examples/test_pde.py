import csv
import math

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything

from examples.pde import Flow, Forecast, VorticityData, WindowTransformer
from lightning_ups.callbacks import ActivationCheckpoint, Compile
from tests.examples.commands import said, said_by


def test_a_flow_that_starts_at_rest_is_the_laminar_one():
    """Of which the equation is solved by hand: nothing is carried along."""
    viscosity, points, seconds = torch.tensor([1e-3, 1e-2]), 32, 0.5
    found = Flow(viscosity, points=points).advance(torch.zeros(2, points, points), steps=25)
    wave = torch.cos(4 * torch.arange(points) * (2 * math.pi / points)).expand(points, points)
    slowed = 16 * viscosity + 0.1
    height = 2 / slowed * (1 - torch.exp(-slowed * seconds))
    torch.testing.assert_close(found, height[:, None, None] * wave, rtol=1e-3, atol=1e-3)


def test_half_the_time_step_gives_the_same_flow():
    viscosity, random = torch.tensor([1e-3, 1e-2]), torch.Generator().manual_seed(0)
    coarse, fine = (Flow(viscosity, points=32, dt=dt) for dt in (0.02, 0.01))
    start = coarse.begin(2, random=random)
    one, other = coarse.advance(start, steps=10), fine.advance(start, steps=20)
    assert (one - other).norm() < 0.01 * (one - start).norm()


def test_data_for_validation_are_trajectories_of_their_own():
    data = VorticityData(points=16, trajectories=8, frames=3, batch_size=4)
    data.setup("fit")
    train = torch.cat([torch.cat([now, later]) for now, _, later in data.train_dataloader()])
    films, viscosity = next(iter(data.val_dataloader()))
    assert (films.shape, viscosity.shape) == ((1, 3, 16, 16), (1,))
    assert not any(torch.equal(frame, other) for frame in films[0] for other in train)


def random_model():
    torch.manual_seed(0)
    model = WindowTransformer(dim=16, depth=2, heads=2)
    torch.nn.init.normal_(model.head.weight)
    return model


def test_no_place_of_the_torus_is_special():
    model, field, viscosity = random_model(), torch.randn(2, 32, 32), torch.tensor([1e-3, 1e-2])
    moved = model(field.roll((16, 16), dims=(1, 2)), viscosity)
    torch.testing.assert_close(moved, model(field, viscosity).roll((16, 16), dims=(1, 2)))


def test_windows_are_shifted():
    """Else nothing would go from one to the next but through 3 x 3 points."""
    model, field, viscosity = random_model(), torch.randn(1, 32, 32), torch.tensor([1e-3])
    field.requires_grad_()
    model(field, viscosity)[0, 0, 0].backward()
    assert field.grad.count_nonzero() > 0.9 * field.numel()


def losses(*callbacks):
    seed_everything(0)
    model, seen = Forecast(dim=16), []
    model.configure_optimizers = lambda: torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = model.training_step
    model.training_step = lambda *args: seen.append(step(*args)) or seen[-1]
    trainer = Trainer(
        accelerator="cpu", max_steps=3, callbacks=[*callbacks], limit_val_batches=0, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, VorticityData(points=16, trajectories=2, frames=7, batch_size=4))
    return torch.stack(seen).tolist()


@pytest.mark.filterwarnings("ignore")
def test_callbacks_find_its_blocks_and_change_no_loss():
    plain = losses()
    assert losses(ActivationCheckpoint(save="nothing")) == plain
    assert losses(Compile(backend="aot_eager")) == pytest.approx(plain, rel=1e-5)


@pytest.mark.timeout(600)  # on a GPU it is compiled, by one thread
def test_a_short_run_by_the_command_line(tmp_path):
    words = ("max_steps=4", "val_check_interval=2", "log_every_n_steps=2", "limit_val_batches=1")
    small = ("points=16", "trajectories=8", "frames=7", "batch_size=4")
    options = [*(f"--trainer.{word}" for word in words), *(f"--data.{word}" for word in small), "--model.depth=1"]
    out = said_by("examples/pde.yaml", *options, folder=tmp_path)
    (table,) = tmp_path.rglob("metrics.csv")
    rows = [*csv.DictReader(table.read_text().splitlines())]
    assert len([row for row in rows if row["val_error"]]) == 2
    assert [*tmp_path.rglob("report.html")]
    assert (tmp_path / said("checkpoint", out)).is_file()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_whole_run_forecasts(tmp_path):
    said_by("examples/pde.yaml", folder=tmp_path)
    (table,) = tmp_path.rglob("metrics.csv")
    last = [row for row in csv.DictReader(table.read_text().splitlines()) if row["val_error"]][-1]
    assert float(last["val_error"]) < 0.3 * float(last["val_unchanged"])
    assert float(last["val_error_far"]) < 0.5 * float(last["val_unchanged_far"])
