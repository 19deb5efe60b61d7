import multiprocessing
import warnings

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_ups.strategies import FSDP2Strategy
from lightning_ups.transforms.checkpoint import is_complete
from tests.toys import Net, loader


def run_of(path, *, epochs=4, callbacks=(), **options):
    return Trainer(
        accelerator="cpu",
        devices=dist.get_world_size() if dist.is_initialized() else 1,
        max_epochs=epochs,
        callbacks=list(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=path,
        **options,
    )


def fit(path, *, strategy, epochs=4, ckpt_path=None, folder="checkpoints", model=None):
    warnings.simplefilter("ignore")
    model = model or Net()
    saver = ModelCheckpoint(path / folder, filename="{epoch}", save_top_k=-1)
    run_of(path, strategy=strategy, epochs=epochs, callbacks=[saver]).fit(model, loader(4), ckpt_path=ckpt_path)
    losses = torch.stack(model.losses)
    dist.all_reduce(losses)
    return (losses / 2).tolist()


def save_and_resume(path, options):
    whole = fit(path, strategy=FSDP2Strategy(**options))
    saved = path / "checkpoints" / "epoch=1.ckpt"
    assert is_complete(saved)
    resumed = fit(path, strategy=FSDP2Strategy(), ckpt_path=saved, folder="again")
    return whole, resumed


@pytest.mark.parametrize("options", [{}, {"async_save": True}, {"save": "full"}], ids=str)
def test_resumes_where_it_was(ranks, tmp_path, options):
    whole, resumed = ranks(save_and_resume, tmp_path, options)
    assert resumed == whole[2:]


class Noisy(Net):
    """Draws random numbers in its steps; its loader shuffles."""

    def training_step(self, batch, index):
        return super().training_step(batch + 0.1 * torch.rand(()), index)


def every_step(path, *, ckpt_path=None, folder="checkpoints", seed=7, accumulate=1, workers=0, strategy=None):
    warnings.simplefilter("ignore")
    multiprocessing.current_process()._config["daemon"] = False  # a daemon, as ranks of the pool are, has no workers
    torch.manual_seed(seed)
    model = Noisy()
    torch.manual_seed(seed + dist.get_rank())
    rows = torch.arange(192.0).reshape(24, 8) / 100
    data = DataLoader(TensorDataset(rows), batch_size=3, shuffle=True, num_workers=workers, collate_fn=stacked)
    saver = ModelCheckpoint(path / folder, filename="{step}", save_top_k=-1, every_n_train_steps=1)
    strategy = strategy or FSDP2Strategy()
    options = {"strategy": strategy, "epochs": 3, "accumulate_grad_batches": accumulate}
    run_of(path, callbacks=[saver], **options).fit(model, data, ckpt_path=ckpt_path)
    losses = torch.stack(model.losses)
    both = [torch.empty_like(losses) for _ in range(dist.get_world_size())]
    dist.all_gather(both, losses)
    return torch.stack(both, dim=1).tolist()


def stacked(rows):
    return torch.stack([row for (row,) in rows])


def every_step_and_resumed(path, step, options):
    whole = every_step(path, **options)
    again = {"ckpt_path": path / "checkpoints" / f"step={step}.ckpt", "folder": "again", "seed": 99}
    return whole, every_step(path, **again, **options)


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"workers": 2}, marks=pytest.mark.slow), {"accumulate": 2}], ids=str
)
@pytest.mark.parametrize("step", [3, 4])
def test_resumes_within_an_epoch_bit_for_bit(ranks, tmp_path, options, step):
    whole, resumed = ranks(every_step_and_resumed, tmp_path, step, options)
    assert len(whole) == 12
    assert resumed == whole[step * options.get("accumulate", 1) :]
