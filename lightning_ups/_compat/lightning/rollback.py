"""Taking a running fit back to a checkpoint: its weights, optimizers, schedulers and step count, not its data."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any

from lightning_ups._compat.patches import applied

__all__ = ["asked_weights_only", "roll_back"]


@contextmanager
def asked_weights_only(trainer: Any) -> Iterator[list[bool | None]]:
    """Yield a list that gets the argument ``weights_only`` of the ``fit`` that begins: Lightning keeps it nowhere."""
    asked: list[bool | None] = []

    def noting(stock: Callable[..., None]) -> Callable[..., None]:
        def resume_start(*args: Any, **options: Any) -> None:
            asked.append(signature(stock).bind(*args, **options).arguments.get("weights_only"))
            stock(*args, **options)

        return resume_start

    target = "lightning.pytorch.trainer.connectors.checkpoint_connector:_CheckpointConnector.resume_start"
    with applied(target, noting, owner=trainer._checkpoint_connector):
        yield asked


def roll_back(trainer: Any, path: Path, *, weights_only: bool | None = False) -> None:
    """Restore from ``path`` what the steps since then have changed; every rank takes part.

    The run goes on with the next batch, as the step that it was when the checkpoint was saved. Callbacks keep their
    state.

    Args:
        trainer: In a fit.
        path: A whole checkpoint.
        weights_only: As for ``Trainer.fit``. False suits a checkpoint that this run has written.
    """
    connector = trainer._checkpoint_connector
    connector.resume_start(str(path), weights_only=weights_only)
    connector.restore_model()
    connector.restore_precision_plugin_state()
    connector.restore_optimizers_and_schedulers()
    _restore_progress(trainer, connector._loaded_checkpoint["loops"]["fit_loop"])
    connector.resume_end()
    for optimizer in trainer.optimizers:
        optimizer.zero_grad(set_to_none=True)


def _restore_progress(trainer: Any, saved: dict[str, Any]) -> None:
    # Of the loops only what counts steps: epochs and batches say where the data are.
    epoch_loop = trainer.fit_loop.epoch_loop
    steps = epoch_loop.automatic_optimization.optim_progress
    steps.load_state_dict(saved["epoch_loop.automatic_optimization.optim_progress"])
    epoch_loop._batches_that_stepped = saved["epoch_loop.state_dict"].get("_batches_that_stepped", trainer.global_step)
