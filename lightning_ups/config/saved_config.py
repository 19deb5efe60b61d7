"""Save the configuration of a run next to its logs."""

from pathlib import Path

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback
from typing_extensions import override

from lightning_ups.config.output import note
from lightning_ups.insight.report import give_to_loggers, reserve, run_folder

__all__ = ["SavedConfig"]


class SavedConfig(SaveConfigCallback):
    """Write ``config.yaml`` next to the logs, or into the root directory, and never overwrite a file.

    A file of that name may be another run's, or the one that the user wrote. ``path`` says where it is.
    """

    path: Path | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        folder = run_folder(trainer)  # a collective: on every rank
        if self.already_saved or self.overwrite or not self.save_to_log_dir or "://" in folder:
            super().setup(trainer, pl_module, stage)
            return
        self.already_saved = True
        if not trainer.is_global_zero:
            return
        name = Path(self.config_filename)
        try:
            self.path = reserve(Path(folder), name=name.stem, ending=name.suffix)
        except OSError as error:
            if stage == "fit":
                raise OSError(
                    f"{folder} is not writable ({error.strerror}), but logs, checkpoints or {name} are written there."
                    " Choose another trainer.default_root_dir."
                ) from error
            note(f"{name} is not saved: {folder} is not writable ({error.strerror}).")
            return
        self.parser.save(self.config, str(self.path), skip_none=False, overwrite=True, multifile=self.multifile)
        self.save_config(trainer, pl_module, stage)
        give_to_loggers(trainer, self.path)
