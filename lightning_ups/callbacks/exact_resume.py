"""Exact resuming within an epoch, under any strategy."""

from typing import Any, get_args

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_ups.order import OnlyOne, Run, refuse_second
from lightning_ups.order.arguments import check_choice
from lightning_ups.state.resume import RESUME_KEY, Connection, OnUnreplayable


class ExactResume(Callback, OnlyOne):
    """Save every rank's position in the training data and its random state in the checkpoint, and restore them.

    A resumed run continues with the same batches, in the same order, and the same random numbers. Lightning alone
    restarts a stock ``DataLoader``, with other samples. `FSDP2Strategy` does this without the callback; use the
    callback there to set ``on_unreplayable``.

    With another number of data-parallel ranks, every rank skips as many whole batches as cover the samples that all
    ranks had consumed.

    Args:
        on_unreplayable: For what cannot be replayed, such as random numbers drawn by workers: ``"warn"`` names it once,
            ``"refuse"`` raises.

    Raises:
        ValueError: If ``on_unreplayable`` is unknown; with ``"refuse"``, if something cannot be replayed.

    Example::

        Trainer(callbacks=[ExactResume(on_unreplayable="refuse")])
    """

    resumes_exactly = True  # a strategy that resumes exactly leaves it to this callback

    def __init__(self, *, on_unreplayable: OnUnreplayable = "warn") -> None:
        why = "It decides about a run that could not be resumed exactly."
        check_choice("on_unreplayable", on_unreplayable, get_args(OnUnreplayable), of="ExactResume", why=why)
        self._policy: OnUnreplayable = on_unreplayable
        self._connection: Connection | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        refuse_second(Run.of(trainer))
        if stage == "fit":
            self._close()
            self._connection = Connection(trainer, on_unreplayable=self._policy)

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._connection is not None:
            checkpoint[RESUME_KEY] = self._connection.state()

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._connection is not None and RESUME_KEY in checkpoint:
            self._connection.load(checkpoint[RESUME_KEY])

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._connection is not None and (line := self._connection.begin()):
            rank_zero_info(line)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._connection is not None:
            self._connection.begin_epoch()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
