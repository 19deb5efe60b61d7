"""Lets all ranks act on a signal at the same step, without synchronizing every step, and detects diverging ranks.

Lightning 2.6.6 broadcasts rank 0's flag before each batch and reads it with ``.item()``, which waits for the device.
Its handler broadcasts again, from within the signal, on whatever rank received it. Here, a flag on the CPU is reduced
over gloo in the background, every few steps, and read when the next one is due, so that all ranks read the same value
at the same step. A number that must be the same on all ranks is checked in the same way. So is SLURM's warning that the
job will end: Lightning saves and requeues within the handler, while the other ranks are in another collective.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_ups._compat.lightning.fit_loop import in_accumulation
from lightning_ups._compat.patches import applied

_LOOP = "lightning.pytorch.loops.training_epoch_loop:_TrainingEpochLoop"
_CONNECTOR = "lightning.pytorch.trainer.connectors.signal_connector:_SignalConnector"
_GROUPS: dict[Any, Any] = {}  # one per process group of the world: another Trainer can use it, too


class SigtermPoll:
    """Checks, over all ranks, whether any of them received SIGTERM, or SLURM's requeue signal.

    Args:
        trainer: The Trainer whose loop and signal handler are changed.
        every: Steps between two checks; a signal stops the run after at most twice as many.
        mark: Returns a number that must be the same on all ranks at each check.
        differ: Raises, on every rank, if it was not.
    """

    def __init__(
        self,
        trainer: Trainer,
        *,
        every: int,
        mark: Callable[[], int] = lambda: 0,
        differ: Callable[[], None] = lambda: None,
    ) -> None:
        self._trainer, self._every, self._mark, self._differ = trainer, every, mark, differ
        self._asked, self._count = False, 0
        self._to_requeue = 0  # the requeue signal that this rank received, until all know of it
        self._requeues = 0  # the same, once all know of it
        # Whether to stop and to requeue, the maximum of the mark, and the negated minimum.
        self._flags = torch.zeros(4, dtype=torch.int64)
        self._pending: Any = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Replace Lightning's handling while the context is open; a run with one rank needs neither."""
        if self._trainer.world_size == 1:
            yield
            return
        loop, connector = self._trainer.fit_loop.epoch_loop, self._trainer._signal_connector
        with (
            applied(f"{_LOOP}._broadcast_sigterm_tensor", lambda _: self.poll, owner=loop),
            applied(f"{_CONNECTOR}._sigterm_notifier_fn", lambda _: self._note, owner=connector),
            applied(f"{_CONNECTOR}._slurm_sigusr_handler_fn", lambda _: self._note_requeue, owner=connector),
        ):
            try:
                yield
            finally:
                self._pending = None

    def poll(self) -> None:
        """Count a step; save, requeue or stop the run if any rank had been asked to at the last check.

        Raises:
            SIGTERMException: On every rank, at the same step.
        """
        if self._trainer.world_size == 1:
            return
        self._count += 1
        is_due = self._count % self._every == 0
        stops = is_due and self._pending is not None and self._read()
        if self._requeues and (stops or not in_accumulation(self._trainer)):  # its gradients are not in a checkpoint
            signum = self._requeues
            self._to_requeue = self._requeues = 0  # the job got one signal, on this rank perhaps after the last check
            connector = self._trainer._signal_connector
            type(connector)._slurm_sigusr_handler_fn(connector, signum, None)  # type: ignore[arg-type]
        if stops:
            self._trainer._signal_connector.received_sigterm = True
            raise SIGTERMException
        if is_due:
            self._send()

    def compare(self) -> None:
        """Wait until it is known that the mark is the same on all ranks now. A collective."""
        if self._trainer.world_size > 1:
            self._send()
            self._read()

    def _send(self) -> None:
        mark = self._mark()
        # In one statement, since a signal may come between any two. If all know of one, another has the same reason.
        to_requeue, self._to_requeue = self._to_requeue, 0
        to_requeue = 0 if self._requeues else to_requeue
        self._flags = torch.tensor([int(self._asked), to_requeue, mark, -mark], dtype=torch.int64)
        self._pending = dist.all_reduce(self._flags, op=dist.ReduceOp.MAX, group=_cpu_group(), async_op=True)

    def _read(self) -> bool:
        """Return whether any rank was asked to stop; the reduction had some steps to finish."""
        self._pending.wait()
        asked, requeues, largest, smallest = self._flags.tolist()  # on the CPU
        self._requeues = self._requeues or requeues
        if largest != -smallest:
            self._differ()
        return bool(asked)

    def _note(self, signum: Any, _: Any) -> None:
        # No collective from here: a signal can arrive at any time. `received_sigterm` is not set either, because loops
        # of this rank alone would stop.
        if not self._asked and (launcher := self._trainer.strategy.launcher) is not None:
            launcher.kill(signum)
        self._asked = True

    def _note_requeue(self, signum: Any, _: Any) -> None:
        self._to_requeue = int(signum)


def _cpu_group() -> Any:
    world = dist.group.WORLD
    if world not in _GROUPS:
        # a separate group: other collectives may wait in the others
        _GROUPS[world] = dist.new_group(backend="gloo", group_desc="sigterm")
    return _GROUPS[world]
