"""The quickstart from Python: a plain Trainer, with parts of lightning_ups added.

python examples/quickstart.py
"""

import argparse

import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_ups.callbacks import Compile, LeanProgressBar, TextSample, TrainingReport, UnigramBaseline
from lightning_ups.data import StdlibText
from lightning_ups.models import GPTModule
from lightning_ups.precision import BF16Precision


def main() -> None:
    """Train, and say where the logs are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max_steps", type=int, default=400)
    parser.add_argument("--root", default="runs/quickstart", help="the folder for logs and checkpoint")
    options = parser.parse_args()

    seed_everything(1)
    on_gpu = torch.cuda.is_available()
    board = TensorBoardLogger(options.root)
    trainer = Trainer(
        devices=1,
        max_steps=options.max_steps,
        max_epochs=-1,
        val_check_interval=min(100, options.max_steps),
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        log_every_n_steps=20,
        logger=[board, CSVLogger(options.root, name=board.name, version=board.version)],
        plugins=[BF16Precision()] if on_gpu else [],
        callbacks=[
            *([Compile()] if on_gpu else []),
            LeanProgressBar(refresh_rate=20),
            ModelCheckpoint(monitor="val_loss", filename="{step}-{val_loss:.3f}"),
            UnigramBaseline(),
            TextSample(prompt="def "),
            TrainingReport(),
        ],
    )
    trainer.fit(GPTModule(size="tiny", lr=4e-3, schedule="wsd", warmup_steps=30), StdlibText())
    print(f"\nlogs {trainer.log_dir}")


if __name__ == "__main__":
    main()
