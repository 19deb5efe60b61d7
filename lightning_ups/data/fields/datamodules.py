"""Datamodules of fields: trajectories that a solver generates, and trajectories of HDF5 files and zarr stores."""

import hashlib
import json
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, get_args
from warnings import filterwarnings

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_ups.data.fields.equations import EQUATIONS, Equation, solve
from lightning_ups.data.fields.files import open_fields
from lightning_ups.data.fields.windows import Batch, InMemory, Statistics, Trajectories, Windows
from lightning_ups.data.workers import Workers, as_it_is, worker_options
from lightning_ups.order.arguments import check_choice, check_least

_FORMAT = 1  # of the cache; raise it when equal arguments give other data


class FieldData(LightningDataModule, ABC):
    """What `GeneratedFields` and `StoredFields` share.

    A batch is (inputs, targets, conditions): frames [batch, time, channels, *grid] that a model is given, those that
    follow, and numbers [batch, P] by which the trajectory is known. All are normalized by the statistics of the
    training data. A checkpoint keeps the statistics.

    Args:
        batch_size: Samples in a batch on each device.
        inputs: Frames that a model is given.
        targets: Frames that it predicts in training, as a rollout.
        val_targets: Frames that it predicts in validation; fewer if the trajectories are shorter.
        num_workers: Worker processes of each loader; ``"auto"``: by a measurement of some seconds.
        seed: For the order of samples.
        cache_dir: Folder of the cache. None: ``lightning_ups`` in the user's cache.
    """

    fields: tuple[str, ...] = ()  # names of the channels; known after `setup`
    num_axes: int = 0
    num_conditions: int = 0
    statistics: Statistics

    def __init__(
        self,
        *,
        batch_size: int = 16,
        inputs: int = 1,
        targets: int = 1,
        val_targets: int = 8,
        num_workers: Workers = 0,
        seed: int = 0,
        cache_dir: str | None = None,
    ) -> None:
        super().__init__()
        sizes = {"batch_size": batch_size, "inputs": inputs, "targets": targets, "val_targets": val_targets}
        for name, value in sizes.items():
            check_least(name, value, 1, of=type(self).__name__, why="It counts samples or frames.")
        self.batch_size, self.inputs, self.targets, self.val_targets = map(int, sizes.values())
        self.num_workers: Workers = num_workers
        self.seed = int(seed)
        default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_ups"
        self.cache_dir = Path(cache_dir or default)
        self._train: Sequence[tuple[Trajectories, int]] = ()
        self._val: Sequence[tuple[Trajectories, int]] = ()

    @override
    def prepare_data(self) -> None:
        self._cached()

    @override
    def setup(self, stage: str) -> None:
        if self._train:
            return
        content = self._cached()
        self._train, self._val = self._split(content)
        self.statistics = Statistics(**{name: content[name] for name in Statistics.__slots__})
        source, _ = self._train[0]
        self.fields, self.num_axes, self.num_conditions = source.fields, len(source.grid), source.conditions.shape[1]

    @override
    def train_dataloader(self) -> DataLoader[Batch]:
        windows = self._windows(self._train, targets=self.targets)
        least = self.batch_size * (1 if self.trainer is None else self.trainer.world_size)
        if len(windows) < least:
            fitting = max(1, len(windows) * self.batch_size // least)
            raise ValueError(
                f"{type(self).__name__} has {len(windows)} windows in an epoch, fewer than a batch of {self.batch_size}"
                f" on each device. Use more trajectories, or batch_size={fitting}."
            )
        return self._loader(windows, shuffle=True)

    @override
    def val_dataloader(self) -> DataLoader[Batch]:
        longest = max(source.frames for source, _ in self._val) - self.inputs
        targets = min(self.val_targets, max(longest, 1))
        return self._loader(self._windows(self._val, targets=targets, stride=targets), shuffle=False)

    @override
    def state_dict(self) -> dict[str, Any]:
        return self.statistics.as_dict() if hasattr(self, "statistics") else {}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict:
            self.statistics = Statistics(**state_dict)

    @property
    @abstractmethod
    def _key(self) -> Mapping[str, Any]:
        """Everything that decides what the cache contains, for JSON."""

    @abstractmethod
    def _make(self) -> dict[str, Any]:
        """Return what the cache is to contain, with the statistics by name."""

    @abstractmethod
    def _split(self, content: Mapping[str, Any]) -> tuple[Sequence[tuple[Trajectories, int]], ...]:
        """Return the trajectories for training and for validation."""

    def _cached(self) -> dict[str, Any]:
        digest = hashlib.sha256(json.dumps([_FORMAT, self._key], sort_keys=True).encode()).hexdigest()[:20]
        path = self.cache_dir / f"fields-{digest}.pt"
        if not path.exists():
            content = self._make()
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:  # another process may write too
                torch.save(content, file)
            os.replace(file.name, path)
        return torch.load(path, weights_only=True, mmap=True)

    def _windows(self, chosen: Sequence[tuple[Trajectories, int]], *, targets: int, stride: int = 1) -> Windows:
        return Windows(chosen, statistics=self.statistics, inputs=self.inputs, targets=targets, stride=stride)

    @cached_property
    def _workers(self) -> dict[str, Any]:
        def make(**workers: Any) -> DataLoader[Batch]:
            return self._loader(self._windows(self._train, targets=self.targets), shuffle=True, workers=workers)

        return worker_options(self.num_workers, make, self.trainer)

    def _loader(self, windows: Windows, *, shuffle: bool, workers: dict[str, Any] | None = None) -> DataLoader[Batch]:
        workers = workers or self._workers
        filterwarnings("ignore", message=".*does not have many workers")
        on_gpu = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        return DataLoader(
            windows,
            batch_size=self.batch_size,
            shuffle=shuffle,
            generator=torch.Generator().manual_seed(self.seed) if shuffle else None,
            drop_last=shuffle,
            collate_fn=as_it_is,
            persistent_workers=workers["num_workers"] > 0,
            pin_memory=on_gpu,
            **workers,
        )


class GeneratedFields(FieldData):
    """Trajectories of an equation, which a solver generates once and keeps in a file.

    The solver runs on the GPU of the Trainer, if it has one. Parameters of the equation, such as its viscosity, are
    drawn for each trajectory and are the conditions.

    Args:
        equation: A name from `lightning_ups.data.fields.EQUATIONS`.
        points: Grid points along each axis.
        trajectories: For training.
        val_trajectories: For validation, of their own.
        frames: Of each trajectory.
        interval: Between frames. None: that of the equation.
        ranges: For parameters of the equation, as ``{name: [low, high]}``. The others have the ranges of the equation.
        batching: The arguments of `FieldData`. ``seed`` is also for the trajectories. The data is in memory, so that
            few models need workers.

    Example::

        Trainer(max_steps=500).fit(PDEModule(size="tiny", conditions=1), GeneratedFields(equation="navier_stokes"))
    """

    def __init__(
        self,
        *,
        equation: Equation = "navier_stokes",
        points: int = 64,
        trajectories: int = 64,
        val_trajectories: int = 8,
        frames: int = 25,
        interval: float | None = None,
        ranges: dict[str, tuple[float, float]] | None = None,
        **batching: Any,
    ) -> None:
        super().__init__(**batching)
        check_choice("equation", equation, get_args(Equation), of="GeneratedFields", why="A solver is known for each.")
        for name, value in {"trajectories": trajectories, "val_trajectories": val_trajectories}.items():
            check_least(name, value, 1, of="GeneratedFields", why="It counts trajectories.")
        self.equation: Equation = equation
        self.points, self.frames, self.interval = points, frames, interval
        self.trajectories, self.val_trajectories = trajectories, val_trajectories
        self.ranges = {name: (float(low), float(high)) for name, (low, high) in (ranges or {}).items()}

    @property
    @override
    def _key(self) -> Mapping[str, Any]:
        names = ("equation", "points", "trajectories", "val_trajectories", "frames", "interval", "ranges", "seed")
        return {name: getattr(self, name) for name in names}

    @override
    def _make(self) -> dict[str, Any]:
        device = torch.device("cpu") if self.trainer is None else self.trainer.strategy.root_device
        films, conditions = solve(
            self.equation,
            count=self.trajectories + self.val_trajectories,
            frames=self.frames,
            points=self.points,
            seed=self.seed,
            interval=self.interval,
            ranges=self.ranges,
            device=device,
        )
        content: dict[str, Tensor] = {"films": films, "conditions": conditions}
        return {**content, **Statistics.of(self._split(content)[0]).as_dict()}

    @override
    def _split(self, content: Mapping[str, Any]) -> tuple[Sequence[tuple[Trajectories, int]], ...]:
        source = InMemory(content["films"], content["conditions"], fields=EQUATIONS[self.equation].fields)
        chosen = [(source, index) for index in range(source.count)]
        return chosen[: self.trajectories], chosen[self.trajectories :]


class StoredFields(FieldData):
    """Trajectories of HDF5 files or zarr stores as PDEBench and The Well have them, read as batches need them.

    Scalars of The Well's files, such as a Reynolds number, are the conditions; PDEBench's files have none. The
    statistics are computed once and kept in a file.

    Args:
        path: An HDF5 file, a zarr store, or a folder of them.
        val_path: The same for validation, such as The Well's ``data/valid``. None: some trajectories of ``path``.
        hold_out_one_in: Without ``val_path``, one trajectory in so many is for validation.
        time_stride: Take one frame in so many.
        space_stride: Take one grid point in so many along each axis.
        statistics_from: At most so many trajectories are read for the statistics. None: all.
        num_workers: As in `FieldData`.
        batching: The other arguments of `FieldData`.

    Raises:
        ModuleNotFoundError: In ``setup``, if h5py or zarr is missing.
        FileNotFoundError: In ``setup``, if there is no file.
        ValueError: In ``setup``, if a layout is unknown, or nothing remains for training or validation.
    """

    def __init__(
        self,
        *,
        path: str,
        val_path: str | None = None,
        hold_out_one_in: int = 10,
        time_stride: int = 1,
        space_stride: int = 1,
        statistics_from: int | None = 256,
        num_workers: Workers = 2,
        **batching: Any,
    ) -> None:
        super().__init__(num_workers=num_workers, **batching)
        check_least("hold_out_one_in", hold_out_one_in, 2, of="StoredFields", why="The rest is for training.")
        for name, value in {"time_stride": time_stride, "space_stride": space_stride}.items():
            check_least(name, value, 1, of="StoredFields", why="It counts frames or grid points.")
        self.path, self.val_path, self.hold_out_one_in = path, val_path, hold_out_one_in
        self.strides = {"time_stride": time_stride, "space_stride": space_stride}
        self.statistics_from = statistics_from

    @property
    @override
    def _key(self) -> Mapping[str, Any]:
        files = [file for file in sorted({Path(self.path), *Path(self.path).rglob("*")}) if file.is_file()]
        stats = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        held_out = self.hold_out_one_in if self.val_path is None else None
        return {"files": stats, "held_out": held_out, "from": self.statistics_from, **self.strides}

    @override
    def _make(self) -> dict[str, Any]:
        return dict(Statistics.of(self._split({})[0], at_most=self.statistics_from).as_dict())

    @override
    def _split(self, content: Mapping[str, Any]) -> tuple[Sequence[tuple[Trajectories, int]], ...]:
        every, held_out = self._listed(self.path), self.hold_out_one_in
        if self.val_path is not None:
            return every, self._listed(self.val_path)
        if len(every) < 2:
            raise ValueError(
                f"{self.path} has {len(every)} trajectories, and training and validation need one each."
                " Use a file with more, or val_path."
            )
        # The last of each group, or of all if they are fewer.
        chosen = {index for index in range(len(every)) if index % held_out == held_out - 1} or {len(every) - 1}
        return (
            [each for index, each in enumerate(every) if index not in chosen],
            [each for index, each in enumerate(every) if index in chosen],
        )

    def _listed(self, path: str) -> list[tuple[Trajectories, int]]:
        return [(file, index) for file in open_fields(path, **self.strides) for index in range(file.count)]


class HDF5Fields(StoredFields):
    """An earlier name of `StoredFields`, for configs and checkpoints that have it."""
