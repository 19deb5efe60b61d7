"""Reads parts of saved tensors directly into shards: from DCP folders, from one file, or from safetensors.

A rank only ever holds its own part, and the pages of the file that it is reading.

DCP pickles every value that is not a tensor. Here torch's restricted unpickler reads them.
"""

import io
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import (
    CheckpointException,
    DefaultLoadPlanner,
    FileSystemReader,
    LoadPlan,
    LoadPlanner,
    StorageReader,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.futures import Future
from typing_extensions import override

from lightning_ups._compat.optional.packages import require
from lightning_ups.state.checkpoint import folder, meta
from lightning_ups.state.checkpoint.checksums import CHECKSUMS, DamagedFileError, Ends, Record, RecordReader, Verifier
from lightning_ups.state.checkpoint.dcp_metadata import TENSORS, read_metadata
from lightning_ups.state.checkpoint.io.filling import Template, fill
from lightning_ups.state.checkpoint.io.lanes import SMALL, Lane, Lanes, spread, wait_for_devices

__all__ = ["FolderReader", "Sliceable", "SlicedReader", "read_into", "safetensors_slices"]


def read_into(
    targets: dict[str, Any],
    reader: StorageReader,
    *,
    group: dist.ProcessGroup | None = None,
    weights_only: bool = True,
) -> None:
    """Fill the tensors of ``targets``, in place, from ``reader`` by name.

    A collective over ``group``; if it fails on one rank, it fails on all. Without a group this process reads alone.
    With ``weights_only=False``, values that are not tensors may have any class.

    Raises:
        ValueError: If something cannot be read, or would run code.
        KeyboardInterrupt: If this process was interrupted.
    """
    reader.read_metadata()  # DCP would hide the reason of an error
    alone, planner = group is None, _SafePlanner() if weights_only else DefaultLoadPlanner()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(targets, storage_reader=reader, planner=planner, process_group=group, no_dist=alone)
    except CheckpointException as error:  # not an Exception, so callers would miss it
        if (interrupt := folder.interruption(error, alone=alone)) is not None:
            raise interrupt from None
        rank, (cause, _) = next(iter(error.failures.items()))
        if isinstance(cause, DamagedFileError):
            raise cause from error
        place = f"{reader.path}" if isinstance(reader, FileSystemReader) else "The checkpoint"
        said = str(cause).partition("\n")[0].partition(". ")[0][:200] or type(cause).__name__
        raise ValueError(
            f"{place} could not be read on rank {rank}: {said}."
            " A file is damaged, or holds something else than tensors and plain values."
            " Use an earlier checkpoint or, if you trust the file and it holds such objects,"
            " FSDP2Strategy(weights_only=False)."
        ) from error


class FolderReader(FileSystemReader):
    """Reads a folder that DCP wrote, several tensors at once; its metadata is parsed, not unpickled.

    Args:
        path: The path of the folder.
        threads: The number of threads; None: the rank's share of the cores, at most 8.
    """

    _metadata: Metadata | None = None
    _records: dict[tuple[str, int], Record] | None = None

    def __init__(self, path: Path, *, threads: int | None = None) -> None:
        super().__init__(path)
        self._threads = threads

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            path = Path(self.path)
            folder.check_format(path)
            files = [path / name for name in (".metadata", TENSORS) if name == ".metadata" or (path / name).exists()]
            for file in files:
                folder.verify(file)
            self._records = folder.records(path)
            self._metadata = read_metadata(files[-1])
        return self._metadata

    @override
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        if any(self._place(item).transform_descriptors for item in plan.items):
            return super().read_data(plan, planner)  # for example, compressed
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                with self._opened(item) as (view, reader):
                    reader.verify()
                    view.seek(0)
                    planner.load_bytes(item, io.BytesIO(view.read()))
        targets = [(i, planner.resolve_tensor(i).detach()) for i in plan.items if i.type is LoadItemType.TENSOR]
        self._fill(targets)
        for item, target in targets:
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _fill(self, targets: list[tuple[ReadItem, Tensor]]) -> None:
        lanes, templates = Lanes(self._threads), dict[Ends, Template]()
        parts = spread(
            targets, nbytes=lambda pair: pair[1].nbytes, parts=lanes.count(target.nbytes for _, target in targets)
        )

        def work(lane: Lane, number: int, part: list[tuple[ReadItem, Tensor]]) -> None:  # noqa: ARG001
            verifier = Verifier(helpers)
            for item, target in part:
                lane.check()
                with self._opened(item, verifier) as (view, reader):
                    fill(target, item, view=view, reader=reader, lane=lane, templates=templates)
            verifier.wait()

        wait_for_devices(target for _, target in targets)
        try:
            with ThreadPoolExecutor(max(1, len(parts)), "checksums") as helpers:
                lanes.run(work, parts)
        finally:
            lanes.close()

    @contextmanager
    def _opened(self, item: ReadItem, verifier: Verifier | None = None) -> Iterator[tuple[IO[bytes], RecordReader]]:
        """Open the saved bytes of an item: a view, and a reader that verifies them."""
        place = self._place(item)
        record, name = self._record(place), str(self.fs.concat_path(self.path, place.relative_path))
        with self.fs.create_stream(name, "rb") as file:
            view = self._slice_file(file, place)
            if place.length > SMALL:
                reader = RecordReader(
                    cast("IO[bytes]", file), offset=place.offset, record=record, name=name, verifier=verifier
                )
                yield view, reader
            else:  # torch reads it dozens of times
                whole = io.BytesIO(view.read())
                yield whole, RecordReader(whole, offset=0, record=record, name=name, verifier=verifier)

    def _record(self, place: Any) -> Record | None:
        if self._records is None:
            return None
        record = self._records.get((place.relative_path, place.offset))
        if record is None or record.length != place.length:
            raise DamagedFileError(
                f"{CHECKSUMS} in {self.path} has no checksums of {place.relative_path} from byte {place.offset}"
                " on. A file there was replaced by that of another checkpoint. Resume from an earlier checkpoint."
            )
        return record

    def _place(self, item: ReadItem) -> Any:
        return self.storage_data[item.storage_index]


class _SafePlanner(DefaultLoadPlanner):
    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        torch.load(value, weights_only=True)  # refuses what DCP's own planner, which reads it next, would build
        value.seek(0)
        super().load_bytes(read_item, value)


class Sliceable(Protocol):
    """A saved tensor that can be read in part."""

    @property
    def shape(self) -> Sequence[int]:
        """The shape of the whole tensor."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which it was saved."""
        ...

    def __getitem__(self, index: tuple[slice, ...], /) -> Tensor:
        """Return a part of the tensor."""
        ...


class SlicedReader(StorageReader):
    """Reads tensors of which each rank takes only its part: from one memory-mapped file, or from safetensors.

    Args:
        tensors: Tensors by name; ordinary ones work, too.
    """

    def __init__(self, tensors: Mapping[str, Sliceable] | Mapping[str, Tensor]) -> None:
        self._tensors: Mapping[str, Any] = tensors

    @override
    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata({name: _described(tensor) for name, tensor in self._tensors.items()})

    @override
    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    @override
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    @override
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @override
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            assert item.type is LoadItemType.TENSOR
            ends = (start + length for start, length in zip(item.storage_offsets, item.lengths, strict=True))
            index = tuple(slice(start, end) for start, end in zip(item.storage_offsets, ends, strict=True))
            target = planner.resolve_tensor(item).detach()
            source = self._tensors[item.storage_index.fqn]
            if isinstance(source, Tensor):  # optimizer state may be sparse, like gradients of an embedding
                source = source.to_dense()
            target.copy_(source[index] if index else source[()])
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    @override
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False


def _described(tensor: Sliceable) -> TensorStorageMetadata:
    size = torch.Size(tensor.shape)
    whole = ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
    return TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), size, [whole])


class _SafetensorsSlice:
    def __init__(self, file: Any, name: str) -> None:
        self._file, self._name = file, name
        description = file.get_slice(name)
        self.shape: Sequence[int] = description.get_shape()
        self.dtype = _DTYPES[description.get_dtype()]

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        return self._file.get_slice(self._name)[index] if index else self._file.get_tensor(self._name)


_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


def safetensors_slices(path: Path) -> dict[str, Sliceable]:
    """Return the tensors of a ``.safetensors`` file, or of a folder of them, without reading any.

    Raises:
        ValueError: If there are none.
    """
    safetensors = require("safetensors", requirement="safetensors>=0.4.3", extra="hf", feature="safetensors")
    found: dict[str, Sliceable] = {}
    for file in _safetensors_files(path):
        try:
            opened = safetensors.safe_open(file, framework="pt")
            for name in opened.keys():  # noqa: SIM118  (not a dict)
                found[name] = _SafetensorsSlice(opened, name)
        except (safetensors.SafetensorError, LookupError) as error:
            raise ValueError(meta.damage(file, error)) from error
    return found


def _safetensors_files(path: Path) -> Iterable[Path]:
    if path.is_file():
        return [path]
    index = path / "model.safetensors.index.json"
    if index.is_file():
        with meta.damage_told(index):
            names = {*meta.read_json(index)["weight_map"].values()}
            if outside := [name for name in names if not meta.is_name_in_folder(name)]:
                raise ValueError(
                    f"{index} names {outside[0]!r}, a file outside its folder. Weights lie in one folder."
                    " Take them from a source that you trust; this index was changed."
                )
        return [path / name for name in sorted(names)]
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ValueError(
            f"{path} holds no safetensors."
            " Weights are looked for in model.safetensors.index.json and in *.safetensors."
            " Name a .safetensors file or a folder with some."
        )
    return files
