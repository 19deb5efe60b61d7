import warnings

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

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
