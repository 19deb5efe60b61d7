"""Reads parts of saved tensors directly into shards: from DCP folders, from one file, or from safetensors.

A rank only ever holds its own part, and the pages of the file that it is reading.

DCP pickles every value that is not a tensor. Here torch's restricted unpickler reads them.
"""

import io
import warnings
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

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
from lightning_ups._compat.torch.tensors.tensor_files import template
from lightning_ups.state.checkpoint import folder, meta
from lightning_ups.state.checkpoint.checksums import CHECKSUMS, DamagedFileError, Ends, Record, RecordReader, Verifier
from lightning_ups.state.checkpoint.dcp_metadata import TENSORS, read_metadata
from lightning_ups.state.checkpoint.io.lanes import SMALL, Lane, Lanes, bytes_of, spread, wait_for_devices

Template = tuple[Tensor, int] | None  # a tensor without its bytes, and the offset of these


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


@torch.no_grad()
def fill(
    target: Tensor,
    item: ReadItem,
    *,
    view: IO[bytes],
    reader: RecordReader,
    lane: Lane,
    templates: dict[Ends, Template] | None = None,
) -> None:
    """Fill ``target`` with the part of a saved tensor that ``item`` selects.

    A part that is contiguous in the file is read directly into host memory, or through the buffers of ``lane`` into GPU
    memory. For any other part the whole tensor is read, as by torch's own reader.

    Args:
        target: A tensor with the shape of the part.
        item: The selected part.
        view: The bytes that ``torch.save`` wrote for the tensor.
        reader: A reader of the same bytes; its verifier may still use them when this returns.
        lane: The lane of this thread.
        templates: Tensors that were read before. Torch takes half a millisecond to parse one.

    Raises:
        ValueError: If the shapes differ, the file is too short, or it differs from what was written.
    """
    if target.shape != item.lengths:
        raise ValueError(f"a part of shape {tuple(item.lengths)} cannot fill one of {tuple(target.shape)}")
    found = _template(view, reader.ends(), {} if templates is None else templates)
    if found is None or not found[0].is_contiguous():
        reader.verify()
        view.seek(0)
        whole = torch.load(view, map_location="cpu", weights_only=True)
        target.copy_(whole[_box(item)] if whole.dim() else whole)
        return
    saved, place = found
    start = _start_of_run(saved, item)
    if start is None:
        whole = torch.empty(saved.shape, dtype=saved.dtype)
        _fill_row(whole, reader, place, lane)
        target.copy_(whole[_box(item)])
        return
    is_direct = target.dtype == saved.dtype and target.device.type in ("cpu", "cuda") and target.is_contiguous()
    if is_direct and _fill_row(target, reader, place + start, lane):
        return
    part = torch.empty(target.shape, dtype=saved.dtype)
    _fill_row(part, reader, place + start, lane)
    target.copy_(part)


def _template(view: IO[bytes], ends: Ends | None, known: dict[Ends, Template]) -> Template:
    if ends is None or not ends.head:  # it may contain anything
        return template(view)
    if ends not in known:
        known[ends] = template(view)
    return known[ends]


def _fill_row(target: Tensor, reader: RecordReader, place: int, lane: Lane) -> bool:
    row = bytes_of(target)
    if row is None:
        return False
    lane.fill(row, reader, place)
    return True


def _start_of_run(saved: Tensor, item: ReadItem) -> int | None:
    """Return the byte offset of the part in the contiguous tensor ``saved``, or None if it is not contiguous."""
    partial = False
    for size, length in zip(reversed(saved.shape), reversed(item.lengths), strict=True):
        if partial and length != 1:
            return None
        partial = partial or length != size
    return saved.itemsize * sum(a * b for a, b in zip(item.storage_offsets, saved.stride(), strict=True))


def _box(item: ReadItem) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(item.storage_offsets, item.lengths, strict=True))


class _SafePlanner(DefaultLoadPlanner):
    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        torch.load(value, weights_only=True)  # refuses what DCP's own planner, which reads it next, would build
        value.seek(0)
        super().load_bytes(read_item, value)


class SlicedReader(StorageReader):
    """Reads tensors of which each rank takes only its part; those of memory-mapped files are not read as a whole.

    Args:
        tensors: Tensors by name.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

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
            source = self._tensors[
                item.storage_index.fqn
            ].to_dense()  # optimizer state may be sparse, as an embedding's
            target.copy_(source[index])
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    @override
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False


def _described(tensor: Tensor) -> TensorStorageMetadata:
    whole = ChunkStorageMetadata(offsets=torch.Size([0] * tensor.dim()), sizes=tensor.shape)
    return TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), tensor.shape, [whole])


def mapped_safetensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a ``.safetensors`` file, or of a folder of them, memory-mapped: nothing is read yet.

    Raises:
        ValueError: If there are none.
    """
    safetensors = require("safetensors", requirement="safetensors>=0.4.3", extra="hf", feature="safetensors")
    found = dict[str, Tensor]()
    for file in _safetensors_files(path):
        try:
            opened = safetensors.safe_open(file, framework="pt")
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  (not a dict)
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
