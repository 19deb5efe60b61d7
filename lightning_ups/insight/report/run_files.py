"""Where the files of a run lie, which loggers keep copies of them, and the images in files of loggers."""

import re
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CometLogger, CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_ups.transforms.quoted import quoted


def run_folder(trainer: Trainer) -> str:
    """Return the folder of this run. Call it on every rank, since rank zero tells the others.

    It is ``trainer.log_dir`` where that belongs to one run. Loggers such as W&B have one folder for all runs; in it,
    the folder of a run is the one to which Lightning writes its checkpoints.
    """
    folder = trainer.log_dir or trainer.default_root_dir
    if not trainer.loggers or isinstance(trainer.loggers[0], (TensorBoardLogger, CSVLogger)) or "://" in folder:
        return folder
    if trainer.is_global_zero:
        name, version = trainer.loggers[0].name, trainer.loggers[0].version
        folder = str(Path(folder, str(name), version if isinstance(version, str) else f"version_{version}"))
    return trainer.strategy.broadcast(folder)


def give_to_loggers(trainer: Trainer, *paths: Path) -> None:
    """Let the loggers of ``trainer`` that keep files (MLflow, W&B, Comet) keep ``paths``; call it on rank zero."""
    for logger in trainer.loggers:
        keep = next((keep for kind, keep in _KEEPERS.items() if isinstance(logger, kind)), None)
        if keep is None:
            continue
        try:
            keep(logger, [path for path in paths if path.exists()])
        except Exception as error:  # noqa: BLE001  (a server that is not reached ends no run)
            rank_zero_warn(
                f"{type(logger).__name__} did not keep {', '.join(path.name for path in paths)}: {quoted(error)}."
                f" The files are in {paths[0].parent}, and the run is not affected."
            )


def logged_images(trainer: Trainer, *, most: int = 24) -> list[tuple[str, bytes]]:
    """Return the last image of each name that TensorBoard or W&B keeps in files, ``most`` at most, by name.

    Call it on rank zero.
    """
    last: dict[str, tuple[int, bytes]] = {}
    for logger in trainer.loggers:
        images = next((images for kind, images in _IMAGES.items() if isinstance(logger, kind)), None)
        try:
            for name, step, png in images(logger) if images is not None else ():
                if step >= last.get(name, (step,))[0]:
                    last[name] = (step, png)
        except Exception as error:  # noqa: BLE001  (a torn file ends no run)
            rank_zero_warn(f"TrainingReport cannot read images of {type(logger).__name__}: {quoted(error)}.")
    return [(name, png) for name, (_, png) in [*last.items()][:most]]


def _of_tensorboard(logger: Any) -> Iterator[tuple[str, int, bytes]]:
    from tensorboard.compat.proto import event_pb2

    messages: Any = event_pb2
    logger.experiment.flush()
    for path in sorted(Path(logger.log_dir).glob("events.out.tfevents.*")):
        with path.open("rb") as file:
            # A record: its length, checksum of that, itself, checksum. Only those that may hold an image are parsed.
            while len(head := file.read(12)) == 12:
                record = file.read(struct.unpack_from("<Q", head)[0])
                file.seek(4, 1)
                if _PNG in record:
                    event = messages.Event.FromString(record)
                    for value in event.summary.value:
                        if value.image.encoded_image_string.startswith(_PNG):
                            yield value.tag, event.step, value.image.encoded_image_string


def _of_wandb(logger: Any) -> Iterator[tuple[str, int, bytes]]:
    folder = Path(logger.experiment.dir, "media", "images")
    for path in folder.rglob("*.png"):
        if name := re.fullmatch(r"(.+)_(\d+)_\w+", path.relative_to(folder).with_suffix("").as_posix()):
            yield name[1], int(name[2]), path.read_bytes()


_PNG = b"\x89PNG"
_OF_WANDB = "config.yaml"  # a file that W&B writes itself
_IMAGES: dict[type, Callable[[Any], Iterator[tuple[str, int, bytes]]]] = {
    TensorBoardLogger: _of_tensorboard,
    WandbLogger: _of_wandb,
}


def _to_mlflow(logger: Any, paths: Sequence[Path]) -> None:
    for path in paths:
        if path.is_dir():
            logger.experiment.log_artifacts(logger.run_id, str(path), artifact_path=path.name)
        else:
            logger.experiment.log_artifact(logger.run_id, str(path))


def _to_wandb(logger: Any, paths: Sequence[Path]) -> None:
    for path in paths:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            # In W&B's own folder: a file elsewhere becomes a link there, which it warns of.
            name = "lightning_ups-config.yaml" if file.name == _OF_WANDB else file.relative_to(path.parent)
            copy = Path(logger.experiment.dir, name)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
            logger.experiment.save(str(copy), base_path=logger.experiment.dir, policy="now")


def _to_comet(logger: Any, paths: Sequence[Path]) -> None:
    for path in paths:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            logger.experiment.log_asset(str(file), file_name=str(file.relative_to(path.parent)))


_KEEPERS: dict[type, Callable[[Any, Sequence[Path]], None]] = {
    MLFlowLogger: _to_mlflow,
    WandbLogger: _to_wandb,
    CometLogger: _to_comet,
}
