"""Wraps a datamodule so that a frozen encoder runs once for each sample."""

import hashlib
import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from copy import copy, deepcopy
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from typing_extensions import override

from lightning_ups.data.latents.batches import LatentBatch, Missing, WithLatents, flatten, unflatten
from lightning_ups.data.latents.fingerprints import (
    BATCH_HOOKS,
    SAMPLES,
    of_code,
    of_hooks,
    of_samples,
    of_weights,
    under_two_seeds,
)
from lightning_ups.data.latents.store import INFO, Latents, LatentsWriter, write_json
from lightning_ups.data.workers import as_it_is
from lightning_ups.order.arguments import check_choice

Dtype = Literal["float32", "bfloat16", "float16"]
_FORMAT = 1
_IDLE = 10  # batches without new samples, after which the encoder leaves the device


class PrecomputedLatents(LightningDataModule):
    """Runs a frozen encoder once for each sample of a datamodule, and reads its outputs from files afterwards.

    Of the dataset's content, only 8 samples are compared with an earlier run. If you correct labels or replace inputs,
    set another ``version``: labels are stored with the latents, and old ones are read otherwise.

    The module receives the batches of ``data`` with the encoder's output in place of one field. During the first pass,
    the encoder runs on the device after ``data`` has moved and changed the batch, and everything in the batch is
    written. Afterwards neither the dataset nor the encoder is called. An interrupted first pass continues with the
    samples that are missing, on any number of ranks, which share the folder.

    The folder's name depends on the encoder (weights, plain attributes and code), on ``collate_fn`` and the batch hooks
    of ``data`` (code and the plain values that it reads), and on 8 samples of each loader after ``collate_fn``.

    Args:
        data: A datamodule whose loaders have datasets with an index and ``batch_size``.
        encoder: The frozen module. It is called with the field, in evaluation mode and without gradients.
        folder: The folder for all latents.
        field: The field of a batch that is encoded: a name or an index. None: the batch itself.
        dtype: Of floating-point latents. None: as the encoder returns them.
        max_gigabytes: The size at which the folder is full. Samples without latents are encoded in each epoch.
        version: A text of your own that is part of the folder's name, for changes that are not detected: those of other
            samples, and of installed packages that the code calls.

    Raises:
        ValueError: If a loader has no index or no ``batch_size``, or samples have different shapes.
        TypeError: If a batch has anything but tensors in tuples, lists and dicts.

    Example::

        data = PrecomputedLatents(ImageFolderData("images"), MyEncoder(), folder="latents")
        Trainer(max_epochs=20).fit(module, data)
    """

    def __init__(
        self,
        data: LightningDataModule,
        encoder: nn.Module,
        *,
        folder: str,
        field: int | str | None = 0,
        dtype: Dtype | None = None,
        max_gigabytes: float | None = None,
        version: str = "",
    ) -> None:
        self.data = data
        super().__init__()
        if dtype is not None:
            check_choice("dtype", dtype, get_args(Dtype), of="PrecomputedLatents", why="Latents are stored in it.")
        self.encoder = encoder.eval().requires_grad_(requires_grad=False)
        self.folder, self.field, self.version = Path(folder), field, version
        self.dtype: torch.dtype | None = None if dtype is None else getattr(torch, dtype)
        self.max_gigabytes = max_gigabytes
        self._encoder_digests: dict[str, str] = {}
        self._splits: dict[str, Latents] = {}
        self._writers: dict[str, LatentsWriter] = {}
        self._probed: set[str] = set()  # splits whose batch hooks were called with two seeds
        self._room: float | None = None  # bytes that this rank may still write
        self._is_full, self._idle, self._on_device = False, 0, False
        for name in ("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader"):
            if not is_overridden(name, data, LightningDataModule):
                setattr(self, name, getattr(super(), name))  # so that Lightning sees that there is none

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "trainer":
            self.data.trainer = value

    @override
    def prepare_data(self) -> None:
        self.data.prepare_data()

    @override
    def setup(self, stage: str) -> None:
        self.data.setup(stage)

    @override
    def teardown(self, stage: str) -> None:
        self._close()
        self.data.teardown(stage)

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._close()
        self.data.on_exception(exception)

    @override
    def state_dict(self) -> dict[str, Any]:
        return self.data.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.data.load_state_dict(state_dict)

    @override
    def train_dataloader(self) -> Any:
        return self._loaders("train")

    @override
    def val_dataloader(self) -> Any:
        return self._loaders("val")

    @override
    def test_dataloader(self) -> Any:
        return self._loaders("test")

    @override
    def predict_dataloader(self) -> Any:
        return self._loaders("predict")

    @override
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if not isinstance(batch, LatentBatch):  # several loaders
            return apply_to_collection(batch, LatentBatch, self.on_after_batch_transfer, dataloader_idx)
        if batch.missing is None:
            assert batch.structure is not None
            self._let_encoder_go()
            return unflatten(batch.structure.content, batch.found)
        return self._encoded(batch.missing, batch.found, dataloader_idx)

    # Loaders

    def _loaders(self, stage: str) -> Any:
        loaders, count = getattr(self.data, f"{stage}_dataloader")(), 0

        def wrapped(loader: DataLoader[Any]) -> DataLoader[Any]:
            nonlocal count
            count += 1
            return self._wrapped(loader, stage if count == 1 else f"{stage}{count}")

        if isinstance(loaders, CombinedLoader):
            loaders = copy(loaders)
            loaders.flattened = [apply_to_collection(each, DataLoader, wrapped) for each in loaders.flattened]
            return loaders
        return apply_to_collection(loaders, DataLoader, wrapped)

    def _wrapped(self, loader: DataLoader[Any], split: str) -> DataLoader[Any]:
        if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
            raise ValueError(
                f"PrecomputedLatents needs a dataset with an index and a batch_size, and the {split} loader of"
                f" {type(self.data).__name__} has a {type(loader.dataset).__name__}, batch_size={loader.batch_size}."
                " Use a dataset with __getitem__ and __len__ that returns one sample."
            )
        latents = self._splits[split] = Latents(self._located(loader, split), len(loader.dataset))  # type: ignore[arg-type]
        latents.refresh()
        rank_zero_info(
            f"PrecomputedLatents: {split}: {latents.count} of {latents.samples} samples are in {latents.path}."
            + (
                f" Only {SAMPLES} samples of the dataset were checked for changes. If labels or other samples changed,"
                " set another version."
                if latents.count
                else ""
            )
        )
        options: dict[str, Any] = {"batch_sampler": loader.batch_sampler}
        if type(loader.batch_sampler) is BatchSampler:
            options = {"batch_size": loader.batch_size, "sampler": loader.sampler, "drop_last": loader.drop_last}
        if loader.num_workers:
            options |= {
                "prefetch_factor": loader.prefetch_factor,
                "persistent_workers": loader.persistent_workers,
                "multiprocessing_context": loader.multiprocessing_context,
            }
        return type(loader)(
            WithLatents(split, loader.dataset, collate=loader.collate_fn, latents=latents),
            collate_fn=as_it_is,
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            generator=loader.generator,
            **options,
        )

    # The folder of a loader

    def _located(self, loader: DataLoader[Any], split: str) -> Path:
        """Return the folder of a loader's latents, which rank 0 chooses and creates."""
        trainer = self.trainer
        path = self._chosen(loader, split) if trainer is None or trainer.is_global_zero else None
        return path if trainer is None else trainer.strategy.broadcast(path)  # type: ignore[return-value]

    def _chosen(self, loader: DataLoader[Any], split: str) -> Path:
        if not self._encoder_digests:
            self._encoder_digests = {
                "the encoder's weights": of_weights(self.encoder),
                "the encoder's code or configuration": of_code(self.encoder),
            }
        hooks = of_hooks(loader.collate_fn, self.data)  # before they are called, which may count calls
        samples, is_fixed = of_samples(loader)
        if not is_fixed:
            rank_zero_warn(
                f"PrecomputedLatents: samples of the {split} loader depend on random numbers, and all epochs will have"
                " those of the first pass. Leave random transforms out of the dataset and collate_fn."
            )
        known = {
            **self._encoder_digests,
            "collate_fn or the batch hooks": hooks,
            "the samples or their transform": samples,
            "the number of samples": len(loader.dataset),  # type: ignore[arg-type]
            "the settings": [_FORMAT, self.field, str(self.dtype), self.version],
        }
        digest = hashlib.blake2b(json.dumps(known).encode(), digest_size=6).hexdigest()
        path = self.folder / f"{split}-{digest}"
        if not (path / INFO).exists():
            self._tell_change(split, known, path)
            path.mkdir(parents=True, exist_ok=True)
            write_json(path / INFO, known)
        return path

    def _tell_change(self, split: str, known: Mapping[str, Any], path: Path) -> None:
        others = [each.parent for each in self.folder.glob(f"{split}-*/{INFO}")]
        if not others:
            return
        last = max(others, key=lambda each: (each / INFO).stat().st_mtime)
        before = json.loads((last / INFO).read_text())
        changed = " and ".join(name for name, value in known.items() if before.get(name) != value)
        rank_zero_info(
            f"PrecomputedLatents: {split}: {changed} changed. Latents are written to {path}; {last}"
            f" ({_gigabytes(_size(last))}) is not used and may be deleted."
        )

    # Encoding

    @torch.no_grad()
    def _encoded(self, missing: Missing, found: tuple[Tensor, ...], dataloader_idx: int) -> Any:
        trainer = self.trainer
        device = torch.device("cpu") if trainer is None else trainer.strategy.root_device
        if not self._on_device:
            self.encoder.to(device)
            self._on_device = True
        self._idle = 0
        self._probe_hooks(missing, device, dataloader_idx)
        batch = self._moved(missing.batch, device, dataloader_idx)
        structure, fresh = flatten(self._with_latents(batch))
        for tensor in fresh:
            if not tensor.dim() or len(tensor) != len(missing.samples):
                raise ValueError(
                    f"PrecomputedLatents found a tensor {[*tensor.shape]} in a batch of {len(missing.samples)} samples."
                    " Every tensor of a batch, and the encoder's output, needs the samples in front."
                )
        self._write(missing, structure, fresh)
        if trainer is not None:
            fresh = trainer.precision_plugin.convert_input(fresh)
        if not found:
            return unflatten(structure, fresh)
        there = [place for place in range(missing.size) if place not in {*missing.places}]
        tensors = []
        for old, new in zip(found, fresh, strict=True):
            tensors.append(new.new_empty(missing.size, *new.shape[1:]))
            tensors[-1][there] = old.to(new)
            tensors[-1][missing.places] = new
        return unflatten(structure, tensors)

    def _moved(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        batch = self.data.on_before_batch_transfer(batch, dataloader_idx)
        batch = self.data.transfer_batch_to_device(batch, device, dataloader_idx)
        return self.data.on_after_batch_transfer(batch, dataloader_idx)

    def _probe_hooks(self, missing: Missing, device: torch.device, dataloader_idx: int) -> None:
        """Warn if the batch hooks change the first batch of a split at random."""
        is_known = missing.split in self._probed
        self._probed.add(missing.split)
        if is_known or not any(is_overridden(name, self.data, LightningDataModule) for name in BATCH_HOOKS):
            return
        with isolate_rng(include_cuda=device.type == "cuda"):
            first, second = under_two_seeds(lambda: self._moved(deepcopy(missing.batch), device, dataloader_idx))
        if first != second:
            rank_zero_warn(
                f"PrecomputedLatents: the batch hooks of {type(self.data).__name__} depend on random numbers, and all"
                f" {missing.split} epochs will have the batches of the first pass. Move random transforms to the"
                " LightningModule."
            )

    def _with_latents(self, batch: Any) -> Any:
        """Return ``batch`` with the encoder's output in place of the field."""
        if self.field is None:
            return self._latents_of(batch)
        latents = self._latents_of(batch[self.field])
        if isinstance(batch, Mapping):
            return {**batch, self.field: latents}
        values = [*batch]
        values[self.field] = latents  # type: ignore[call-overload]
        return values if isinstance(batch, list) else tuple(values)

    def _latents_of(self, inputs: Any) -> Any:
        dtype = next((each.dtype for each in self.encoder.parameters() if each.is_floating_point()), None)
        latents = self.encoder(_cast(inputs, dtype))
        return _cast(latents, self.dtype)

    def _write(self, missing: Missing, structure: Any, tensors: list[Tensor]) -> None:
        latents, size = self._splits[missing.split], sum(tensor.nbytes for tensor in tensors)
        if self._is_full:
            return
        if missing.split not in self._writers:
            self._writers[missing.split] = LatentsWriter(latents.path)
            self._tell_size(latents, size / len(missing.samples))
        why = "" if self._room is None or size <= self._room else f"max_gigabytes={self.max_gigabytes:g} is reached"
        try:
            if not why:
                self._writers[missing.split].append(missing.samples, structure, tensors)
        except OSError as error:  # no space is left
            why = error.strerror or str(error)
        if why:
            self._is_full = True
            rank_zero_warn(
                f"PrecomputedLatents: no more latents are written to {self.folder}: {why}."
                " Samples without latents are encoded in each epoch."
            )
        elif self._room is not None:
            self._room -= size

    def _tell_size(self, latents: Latents, each: float) -> None:
        if self.max_gigabytes is not None and self._room is None:
            ranks = 1 if self.trainer is None else self.trainer.world_size
            self._room = (self.max_gigabytes * 1e9 - _size(self.folder)) / ranks
        wanted = (latents.samples - latents.count) * each
        free = shutil.disk_usage(latents.path).free
        rank_zero_info(
            f"PrecomputedLatents: {latents.samples - latents.count} samples of {each / 1e3:.1f} kB"
            f" ({_gigabytes(wanted)}) are encoded once and written to {latents.path}"
            + (f". The disk has only {_gigabytes(free)}." if free < wanted else ".")
        )

    def _close(self) -> None:
        for writer in self._writers.values():
            with suppress(OSError):
                writer.close()
        self._writers, self._room, self._is_full = {}, None, False

    def _let_encoder_go(self) -> None:
        self._idle += 1
        if self._on_device and self._idle >= _IDLE:
            self.encoder.cpu()
            self._on_device = False


def _cast(tree: Any, dtype: torch.dtype | None) -> Any:
    """Return ``tree`` with its floating-point tensors in ``dtype``."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)

    return apply_to_collection(tree, Tensor, cast)


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.2f} GB"
