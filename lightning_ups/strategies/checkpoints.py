"""Saves and loads checkpoints of all sharding strategies."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal
from weakref import ref

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch import __version__ as lightning_version
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_ups._compat.lightning.checkpoints import (
    ask_strategy_for_last,
    checkpoint_folders,
    last_checkpoints,
    names_of_checkpoints,
    own_folder,
)
from lightning_ups._compat.lightning.sharding import regroup, regroups
from lightning_ups.order import PolicyPrecision, applied
from lightning_ups.state.checkpoint import (
    ABANDONED_S,
    MODELS,
    Saver,
    Signature,
    claim,
    clean,
    damage_told,
    described,
    gathered,
    has_checksums,
    load,
    load_optimizers,
    located,
    make,
    named_state,
    neighbors,
    newer,
    newest,
    numbered,
    one_at_a_time,
    resolve,
    save_sharded,
    save_whole,
    settle,
    unwritable,
    with_all_stages,
)
from lightning_ups.state.resume import RESUME_KEY, Connection, OnUnreplayable

Save = Literal["sharded", "full"]

# Hyperparameters are only for reading the file; resuming does not need them, and they may have any class.
_APART = (
    LightningModule.CHECKPOINT_HYPER_PARAMS_KEY,
    LightningModule.CHECKPOINT_HYPER_PARAMS_NAME,
    LightningModule.CHECKPOINT_HYPER_PARAMS_TYPE,
    LightningDataModule.CHECKPOINT_HYPER_PARAMS_KEY,
    LightningDataModule.CHECKPOINT_HYPER_PARAMS_NAME,
    LightningDataModule.CHECKPOINT_HYPER_PARAMS_TYPE,
)
_REQUEUED = "hpc_ckpt"  # Lightning saves it when SLURM ends the job, and requeues the job at once
_GRACE_S = 60.0  # for a save in progress when training fails


class Checkpoints:
    """Saves, loads and removes the checkpoints of one strategy.

    Args:
        strategy: The strategy with the module and optimizers.
        save: An argument of the strategy, as all that follow.
        async_save: See there.
        weights_only: See there.
        on_unreplayable: See there.

    Raises:
        ValueError: If a full checkpoint should be written in the background.
    """

    def __init__(
        self,
        strategy: Strategy,
        *,
        save: Save,
        async_save: bool,
        weights_only: bool,
        on_unreplayable: OnUnreplayable,
    ) -> None:
        if save == "full" and async_save:
            raise ValueError(
                f"{type(strategy).__name__}(save='full', async_save=True) contradicts itself: tensors are not gathered"
                " during training. Use save='sharded', and make one file of it later: python -m lightning_ups export."
            )
        self._strategy, self._sharded, self._weights_only = strategy, save == "sharded", weights_only
        self._saver = Saver(asynchronous=async_save, timeout=timedelta(minutes=60))
        self._policy: OnUnreplayable = on_unreplayable
        ask_strategy_for_last()
        self._connection: Connection | None = None
        self._blocked_s: list[float] = []
        self._gathered: list[ref[Tensor]] = []  # what `module_state` has last gathered on this rank
        self._claims: dict[Path, Signature] = {}  # claims of this run, by directory
        self._created: set[Path] = set()  # the directories that this run created
        self._given: dict[str, Any] = {}  # the module state that `load` returned
        self._read_later: Path | None = None

    @property
    def saver(self) -> Saver:
        """The writer of sharded checkpoints; its ``observe`` may be set."""
        return self._saver

    def check_places(self) -> None:
        """Raise, before training, if checkpoints of a callback cannot be saved to their directory.

        Raises:
            ValueError: On every rank.
        """
        reasons: list[str] = []
        for place, callbacks in self._places().items():
            if reason := unwritable(place):
                reasons.append(
                    f"No checkpoint could be saved in {place}: {reason}. Give ModelCheckpoint another dirpath, or the"
                    " Trainer another default_root_dir, or make it writable."
                )
            elif self._strategy.is_global_zero and (names := names_of_checkpoints(callbacks)):
                with suppress(OSError):  # the first save raises the error
                    if other := self._claim(place, names=names):
                        reasons.append(
                            f"{place} is used by another run, whose checkpoints have the same names: {other}."
                            f" {own_folder(self._trainer, callbacks[0], place)}"
                        )
        for reason in self._strategy.broadcast(reasons):
            raise ValueError(reason)

    def _places(self) -> dict[Path, list[Any]]:
        places: dict[Path, list[Any]] = {}
        for callback in [] if self._trainer.fast_dev_run else self._trainer.checkpoint_callbacks:  # type: ignore[attr-defined]
            saves = getattr(callback, "save_top_k", None) != 0 or getattr(callback, "save_last", None)
            if saves and (place := getattr(callback, "dirpath", None)):
                places.setdefault(self._local(place, None), []).append(callback)
        return places

    def follow(self, trainer: Trainer) -> None:
        """Follow the training data, so that a run can resume within an epoch, unless a callback does that."""
        self._unfollow()
        if not any(getattr(callback, "resumes_exactly", False) for callback in trainer.callbacks):  # type: ignore[attr-defined]
            self._connection = Connection(trainer, on_unreplayable=self._policy)

    def begin(self) -> None:
        """Restore the random state of the checkpoint when training begins."""
        if self._connection is not None:
            if line := self._connection.begin():
                rank_zero_info(line)
            self._connection.begin_epoch()

    def module_state(self) -> dict[str, Any]:
        """Return the module's state with DTensors, or gathered on rank 0."""
        state = self._module.state_dict()
        if self._sharded:
            return state
        whole = gathered(state)  # a collective
        whole = whole if self._strategy.is_global_zero else {}
        self._gathered = [
            ref(whole[name]) for name, value in state.items() if name in whole and isinstance(value, DTensor)
        ]
        return whole

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state with DTensors by name, or gathered on rank 0 with indices."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        state = named_state(self._module, optimizer)
        if self._sharded:
            return with_all_stages(self._module, state, self._saver.group)
        whole = gathered(state)
        return numbered(whole) if self._strategy.is_global_zero else {}

    def save(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Save the checkpoint collected by ``Trainer.save_checkpoint``.

        Raises:
            TypeError: If ``storage_options`` are given.
            ValueError: If the path is not in a file system.
            RuntimeError: If this save, or the previous one in the background, failed.
        """
        path = self._local(self._strategy.broadcast(path), storage_options)
        if self._strategy.is_global_zero and not self._is_outside_a_run():
            with suppress(OSError):  # the save itself raises the error
                if path.parent in self._claims:
                    self._claims[path.parent].renew()
                elif other := self._claim(path.parent, names=[path.name]):
                    rank_zero_warn(f"{path} is also saved by another run: {other}. Give one of them another path.")
        if self._connection is not None and "optimizer_states" in checkpoint:
            checkpoint[RESUME_KEY] = self._connection.state()
        if models := described(self._module):
            checkpoint[MODELS] = models
        if self._sharded:
            save_sharded(self._saver, checkpoint, path, apart=_APART)
            if path.name.startswith(_REQUEUED) or self._is_outside_a_run():
                self._saver.wait()  # no later call waits for it
        else:
            # Callbacks that average weights store the module's own weights elsewhere, and the average in their place.
            were_sharded = [tensor for each in self._gathered if (tensor := each()) is not None]
            save_whole(self._saver, checkpoint, path, module=self._module, were_sharded=were_sharded)
        self._report(path)

    def find_last(self, trainer: Trainer) -> Path | None:
        """Return the checkpoint that ``ckpt_path="last"`` refers to: the newest complete one with the name "last".

        Restores the paths of checkpoints after a killed run. Called on every rank, before the process group exists.
        """
        folders = checkpoint_folders(trainer)
        for directory in folders:
            settle(directory)
        names = [Path(name) for name in last_checkpoints(trainer)]
        found: Path | None = None
        for name in sorted(names):
            found = newer(found, name) if located(name) else found
        if found is None and (names or any(folders.values())):
            # The first is incomplete, or its link was about to be created: use any other of this run.
            for directory in folders:
                found = newer(found, newest(directory))
            if found is not None:
                rank_zero_warn(
                    f"ckpt_path='last': no whole checkpoint is called last. Resuming from {found}, the newest."
                )
            elif names:
                torn = ", ".join(map(str, names))
                rank_zero_warn(
                    f"ckpt_path='last': {torn} is not whole, and there is no other. Training starts at step 0."
                )
        return found

    def load(self, path: str | Path) -> dict[str, Any]:
        """Read a checkpoint into the module and, in fit, into the optimizers; return the rest of it.

        Raises:
            FileNotFoundError: If there is no complete one.
            ValueError: If it does not fit this run.
        """
        found = self._found(self._local(self._strategy.broadcast(path), None))
        optimizers = self._strategy.optimizers if self._trainer.state.fn == TrainerFn.FITTING else []
        is_regrouped = regroups(self._trainer)  # by callbacks that are restored first
        self._read_later = found if optimizers and is_regrouped else None
        rest, left = load(
            found,
            module=self._module,
            optimizers=[] if is_regrouped else optimizers,
            strict=self._module.strict_loading,
            weights_only=self._weights_only,
            needless=_APART,
            group=self._saver.group,
        )
        if found.is_dir() and not has_checksums(found):
            rank_zero_info(f"{found} was not verified: an earlier version wrote it, without checksums.")
        if left:
            rank_zero_warn(
                f"{found}: hyperparameters of untrusted classes were left out:"
                f" {', '.join(f'{name} at {place}' for place, name in list(left.items())[:5])}. Resuming does not need"
                " them. To read them, use torch.serialization.add_safe_globals([...]), or"
                f" {type(self._strategy).__name__}(weights_only=False) if you trust the file."
            )
        if self._connection is not None and RESUME_KEY in rest:
            with damage_told(found):
                self._connection.load(rest[RESUME_KEY])
        if isinstance(self._strategy.precision_plugin, PolicyPrecision):
            self._strategy.precision_plugin.after_restore(self._module)
        self._given = self._module.state_dict()
        # Callbacks that average weights read them there. Files with only weights have no version.
        return {"pytorch-lightning_version": lightning_version, **rest, "state_dict": {**self._given}}

    @property
    def reads_optimizers_later(self) -> bool:
        """Whether `load` has left the optimizer states for `load_optimizers`."""
        return self._read_later is not None

    def load_optimizers(self) -> None:
        """Read the optimizer states from the checkpoint of the last `load`."""
        found, self._read_later = self._read_later, None
        assert found is not None
        regroup(self._trainer)
        load_optimizers(
            found,
            module=self._module,
            optimizers=self._strategy.optimizers,
            weights_only=self._weights_only,
            needless=_APART,
            group=self._saver.group,
        )

    def check_unchanged(self, checkpoint: dict[str, Any]) -> None:
        """Raise if the module's ``on_load_checkpoint`` changed what `load` had already read.

        Raises:
            ValueError: If it replaced weights or optimizer states.
        """
        given, self._given = self._given, {}
        now = checkpoint["state_dict"]
        changed = sorted(
            n for n in given.keys() | now.keys() if n not in given or n not in now or now[n] is not given[n]
        )
        if "optimizer_states" in checkpoint:
            changed.append("optimizer_states")
        if changed:
            raise ValueError(
                f"{type(self._module).__name__}.on_load_checkpoint has changed {', '.join(changed[:5])} in the"
                " checkpoint, which has no effect: weights and optimizers are read before that hook. Make one file of"
                " the checkpoint (python -m lightning_ups export --format torch), change that, and resume from it."
            )
        if self.reads_optimizers_later:
            checkpoint["optimizer_states"] = []  # Lightning expects the key before it calls the strategy

    @contextmanager
    def keeping_place(self) -> Iterator[None]:
        """Keep the position in the data and the random state while a checkpoint is loaded in this context."""
        connection, self._connection = self._connection, None
        try:
            yield
        finally:
            self._connection = connection

    def remove(self, path: str | Path) -> None:
        """Delete a checkpoint, once the one in progress is complete."""
        self._saver.remove(Path(path))

    def _claim(self, directory: Path, *, names: Sequence[str]) -> str | None:
        """Claim ``directory`` for checkpoints of these names, and delete what killed runs left half written there.

        Returns:
            The running process that has claimed some of these names. Then nothing is claimed.
        """
        if not directory.is_dir():
            make(directory)
            self._created.add(directory)
        with one_at_a_time(directory):
            others = [*neighbors(directory)]
            same = [other for other in others if {*names} & {*map(str, other.claim.names)}]
            if alive := [other for other in same if other.is_alive]:
                return str(alive[0])
            self._claims[directory] = claim(directory, names=names)
        for other in others:
            if other.is_alive is False:
                other.file.unlink(missing_ok=True)
        for other in same:
            if other.is_alive is None:
                rank_zero_warn(
                    f"{directory} may be used by another run, on another machine: {other}. Two runs would overwrite and"
                    " delete each other's checkpoints. If it still runs, give one of them another dirpath."
                )
        is_ours = others and all(other.is_alive is False for other in others)
        deleted = clean(directory, unchanged_s=0.0 if is_ours else ABANDONED_S)
        if deleted:
            rank_zero_info(
                f"{directory}: deleted {sum(deleted.values()) / 1e9:.2f} GB that a killed run had left half written:"
                f" {', '.join(sorted(deleted))}."
            )
        return None

    def _unclaim(self) -> None:
        for directory, signature in self._claims.items():
            with suppress(OSError):
                signature.remove()
                if directory in self._created:  # an empty folder of the user stays
                    directory.rmdir()  # if nothing was saved
        self._claims, self._created = {}, set()

    def _is_outside_a_run(self) -> bool:
        state = self._trainer.state
        ending = state.status == TrainerStatus.INTERRUPTED and state.stage is not None  # `fail` waits that long
        return state.status != TrainerStatus.RUNNING and not ending

    def fail(self) -> None:
        """Wait for a save in progress to end, after an exception."""
        self._unfollow()
        if failure := self._saver.abandon(timeout_s=_GRACE_S):
            rank_zero_warn(failure)
        self._unclaim()

    def close(self) -> None:
        """Wait for a save in progress.

        Raises:
            RuntimeError: If it failed.
        """
        self._unfollow()
        try:
            self._saver.close()
        finally:
            self._unclaim()

    def _unfollow(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @property
    def _module(self) -> LightningModule:
        assert self._strategy.lightning_module is not None
        return self._strategy.lightning_module

    @property
    def _trainer(self) -> Trainer:
        return self._module.trainer

    def _found(self, path: Path) -> Path:
        # `last` is a link or is overwritten: the run may have been killed while writing the newest one. For a requeued
        # job, Lightning chooses the checkpoint by its number.
        if (path.is_symlink() or path.stem.startswith(("last", _REQUEUED))) and not path.resolve().is_file():
            try:
                return resolve(path)
            except FileNotFoundError:
                if (whole := newest(path.parent)) is None:
                    raise
                rank_zero_warn(
                    f"{path} is incomplete: the process that wrote it died, or its disk was full. The run resumes from"
                    f" {whole}, the newest complete checkpoint next to it."
                )
                return whole
        return resolve(path)

    def _local(self, path: str | Path, storage_options: Any) -> Path:
        if storage_options is not None:
            raise TypeError(
                f"{type(self._strategy).__name__} does not support storage_options={storage_options!r}, which belong to"
                " a CheckpointIO. Leave them out."
            )
        if "://" in str(path) and not str(path).startswith("file://"):
            raise ValueError(
                f"{type(self._strategy).__name__} cannot keep checkpoints at {path}: an object store cannot rename"
                " folders. Give a directory that all nodes see, and copy from it."
            )
        return Path(str(path).removeprefix("file://"))

    def _report(self, path: Path) -> None:
        last, trainer = self._saver.last, self._trainer
        if last is None:
            return
        self._blocked_s.append(last.blocked_s)
        if (context := applied(self._strategy)) is not None:
            context.report.update("Checkpoints", saves=len(self._blocked_s), blocked_s=sum(self._blocked_s))
        if self._strategy.is_global_zero:
            for logger in trainer.loggers:
                logger.log_metrics({"checkpoint/blocked_s": last.blocked_s}, step=trainer.global_step)
