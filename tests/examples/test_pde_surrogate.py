import csv

import pytest
import torch

from lightning_ups.models.pde import PDEModule
from tests.examples.commands import ROOT, run, said, said_by


@pytest.mark.timeout(600)  # on a GPU it is compiled, by one thread
def test_from_a_file_to_a_surrogate_with_pictures(tmp_path):
    pytest.importorskip("h5py")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(str(ROOT / "examples" / "pde_file.py"), "flow.hdf5", folder=tmp_path)
    words = ("max_steps=4", "val_check_interval=2", "log_every_n_steps=2", "limit_val_batches=1")
    options = [*(f"--trainer.{word}" for word in words), "--data.cache_dir=cache", "--data.batch_size=4"]
    out = said_by("examples/pde_surrogate.yaml", "--data.path=flow.hdf5", *options, folder=tmp_path)
    logs = tmp_path / said("logs", out)
    rows = [*csv.DictReader((logs / "metrics.csv").read_text().splitlines())]
    assert len([row for row in rows if row["val_nrmse_rollout"]]) == 2
    for name in ("rollout/u", "rollout_video/u"):
        assert len(EventAccumulator(str(logs)).Reload().Images(name)) == 2
        assert f'alt="{name}" src="data:image/png' in (logs / "report.html").read_text()

    # As docs/guides/pde.md uses what was trained.
    path = tmp_path / said("checkpoint", out)
    module = PDEModule.load_from_checkpoint(path)
    known = torch.load(path, weights_only=True)["StoredFields"]
    assert {*known} == {"mean", "std", "condition_mean", "condition_std"}
    assert module.model.rollout(torch.randn(1, 1, 1, 32, 32), torch.zeros(1, 0), steps=3).shape == (1, 3, 1, 32, 32)
