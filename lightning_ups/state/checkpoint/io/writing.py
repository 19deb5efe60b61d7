"""Writes a rank's part of a checkpoint into several files at once, in DCP's own format."""

import io
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter, Metadata, SavePlan, SavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from typing_extensions import override

from lightning_ups._compat.torch.tensors.tensor_files import around, noted
from lightning_ups.state.checkpoint import folder
from lightning_ups.state.checkpoint.checksums import CHECKSUMS, Piece, Record, SummedRecord
from lightning_ups.state.checkpoint.checksums import as_json as checksums_as_json
from lightning_ups.state.checkpoint.dcp_metadata import TENSORS
from lightning_ups.state.checkpoint.dcp_metadata import as_json as metadata_as_json
from lightning_ups.state.checkpoint.io.lanes import Lane, Lanes, bytes_of, spread, wait_for_devices


@dataclass(frozen=True)
class _SummedResult(WriteResult):
    record: Record


class Writer(FileSystemWriter):
    """Writes every tensor as ``torch.save`` would, byte for byte except for its checksum, and each byte once.

    Checksums of this package are computed during the write. The coordinator's ``files`` holds them, and the metadata as
    JSON. Torch's own writer computes a checksum that nothing reads, clones every tensor that is a part of other memory,
    copies from a GPU through unpinned memory, and does all of that in one thread, alternating with the disk. With
    several threads it loses errors of all but the first: the checkpoint then silently lacks tensors.

    Args:
        path: The path of the folder.
        lanes: Each lane writes one file.
    """

    def __init__(self, path: Path, *, lanes: Lanes) -> None:
        super().__init__(path, sync_files=True)
        self._lanes = lanes
        self.files: dict[str, bytes] = {}  # available once all ranks have written

    @override
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        stored, records = dict[MetadataIndex, Any](), dict[tuple[str, int], Record]()
        for result in (each for of_rank in results for each in of_rank):
            assert isinstance(result, _SummedResult)
            stored[result.index] = place = result.storage_data
            records[place.relative_path, place.offset] = result.record
        self.files = {CHECKSUMS: checksums_as_json(records), TENSORS: metadata_as_json(metadata, stored)}

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        parts = spread(plan.items, nbytes=_size, parts=self._lanes.count(map(_size, plan.items)))
        results: list[WriteResult] = []
        sums: dict[MetadataIndex, list[int]] = {}

        def write(lane: Lane, number: int, items: list[WriteItem]) -> None:
            name = f"{plan.storage_data.prefix}{number}.distcp"
            results.extend(self._write_file(name, items, planner, lane, helpers, sums))

        try:
            tensors = {i.index: planner.resolve_data(i) for i in plan.items if i.type is not WriteItemType.BYTE_IO}
            wait_for_devices(tensors.values())
            rows = {index: row for index, tensor in tensors.items() if (row := _row_of(tensor)) is not None}
            sums.update(zip(rows, self._lanes.sums(rows.values()), strict=True))
            with ThreadPoolExecutor(max(1, len(parts)), "checksums") as helpers:
                self._lanes.run(write, parts)
        except Exception as error:
            raise folder.system_error(error) from error
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _write_file(
        self,
        name: str,
        items: list[WriteItem],
        planner: SavePlanner,
        lane: Lane,
        helpers: Executor,
        sums: Mapping[MetadataIndex, Sequence[int]],
    ) -> list[WriteResult]:
        results, offset = list[WriteResult](), 0
        with self.fs.create_stream(self.fs.concat_path(self.path, name), "wb") as stream:
            for item in items:
                lane.check()
                data = planner.resolve_data(item)
                summed = SummedRecord(cast("IO[bytes]", stream), helpers, lane.chunk)
                record = _write(data, summed, lane, sums.get(item.index, ()))
                place = noted(name, offset=offset, length=record.length)
                results.append(_SummedResult(item.index, record.length, place, record))
                offset += record.length
            stream.flush()
            os.fsync(stream.fileno())
        return results


def _row_of(tensor: Any) -> Tensor | None:
    return bytes_of(tensor.detach()) if tensor.device.type in ("cpu", "cuda") else None


def _write(data: Tensor | io.BytesIO, summed: SummedRecord, lane: Lane, sums: Sequence[int]) -> Record:
    if isinstance(data, Tensor):
        tensor = data.detach()
        row = _row_of(tensor)
        if row is None:
            tensor = _settled(tensor)
            row = bytes_of(tensor)
        form = None if row is None else around(tensor.dtype, tuple(tensor.shape), tensor.stride())
        if row is not None and form is not None:
            summed.write_head(form[0])
            summed.write_body(lane.pieces(row, sums))
            return summed.write_tail(form[1])
        data = io.BytesIO()
        torch.save(tensor, data)
    summed.write_head(b"")
    summed.write_body([Piece(data.getbuffer())])
    return summed.write_tail(b"")


def _settled(tensor: Tensor) -> Tensor:
    host = tensor.cpu().resolve_conj().resolve_neg()
    return host.contiguous() if host.layout is torch.strided else host


def _size(item: WriteItem) -> int:
    data = item.tensor_data
    return 0 if data is None else data.chunk.sizes.numel() * data.properties.dtype.itemsize
