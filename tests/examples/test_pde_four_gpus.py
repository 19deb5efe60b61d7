import pytest
import torch

from lightning_ups.data.fields.files import write_pdebench
from tests.examples.commands import ROOT, run

CONFIG = str(ROOT / "examples" / "pde_four_gpus.yaml")
SMALL = (
    "--model.size=tiny",
    "--data.batch_size=2",
    "--data.targets=2",
    "--data.num_workers=0",
    "--data.cache_dir=cache",
)


@pytest.fixture
def folder(tmp_path):
    pytest.importorskip("h5py")
    films = torch.randn(4, 20, 16, 16).cumsum(1)
    write_pdebench(tmp_path / "flow.hdf5", {"vorticity": films}, interval=0.1, length=1.0)
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_plan_accepts_it(folder):
    out = run("-m", "lightning_ups", "plan", "--config", CONFIG, "--gpu", "a100-80", *SMALL, folder=folder)
    assert "it fits" in out


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_verify_accepts_it_and_two_processes_train(folder):
    words = ("--config", CONFIG, "--trainer.accelerator=cpu", *SMALL)
    assert "GREEN" in run("-m", "lightning_ups", "verify", "--no_faults", "--steps=2", *words, folder=folder)
    short = ("--trainer.devices=2", "--trainer.max_steps=2", "--trainer.val_check_interval=4", "--preset=cpu")
    out = run("-m", "lightning_ups", "fit", *words, *short, folder=folder)
    assert [*folder.rglob("*.ckpt")], out
    assert [*folder.rglob("report.html")], out
