"""Writing a rank's part of a checkpoint into several files at once, in the form that DCP itself writes and reads."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter, SavePlan, SavePlanner
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from typing_extensions import override

from lightning_ups._compat.tensor_files import around, noted
from lightning_ups.transforms.checkpoint import folder
from lightning_ups.transforms.checkpoint.lanes import Lane, Lanes, bytes_of, spread, wait_for_devices

__all__ = ["Writer"]


class Writer(FileSystemWriter):
    """Writes every tensor as ``torch.save`` would, byte for byte but for a checksum, and each byte once.

    Torch's own writer sums up every tensor for a checksum that nothing reads, clones every tensor that is a part of
    other memory, fetches from a GPU through memory that is not pinned, and all of that in one thread, in turns with the
    disk. With more threads it loses errors of all but the first: the checkpoint then lacks tensors and nobody knows.

    Args:
        path: Of the folder.
        lanes: Write one file each.
    """

    def __init__(self, path: Path, *, lanes: Lanes) -> None:
        super().__init__(path, sync_files=True)
        self._lanes = lanes

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        parts = spread(plan.items, nbytes=_size, parts=self._lanes.count(map(_size, plan.items)))
        results: list[WriteResult] = []

        def write(lane: Lane, number: int, items: list[WriteItem]) -> None:
            results.extend(self._write_file(f"{plan.storage_data.prefix}{number}.distcp", items, planner, lane))

        try:
            wait_for_devices(planner.resolve_data(i) for i in plan.items if i.type is not WriteItemType.BYTE_IO)
            self._lanes.run(write, parts)
        except Exception as error:
            raise folder.system_error(error) from error
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _write_file(self, name: str, items: list[WriteItem], planner: SavePlanner, lane: Lane) -> list[WriteResult]:
        results, offset = list[WriteResult](), 0
        with self.fs.create_stream(self.fs.concat_path(self.path, name), "wb") as stream:
            for item in items:
                lane.check()
                data = planner.resolve_data(item)
                if isinstance(data, Tensor):
                    _write_tensor(data.detach(), stream, lane)
                else:
                    stream.write(data.getbuffer())
                length = stream.tell() - offset
                place = noted(name, offset=offset, length=length)
                results.append(WriteResult(index=item.index, size_in_bytes=length, storage_data=place))
                offset += length
            stream.flush()
            os.fsync(stream.fileno())
        return results


def _write_tensor(tensor: Tensor, stream: Any, lane: Lane) -> None:
    row = bytes_of(tensor) if tensor.device.type in ("cpu", "cuda") else None
    if row is None:
        tensor = _settled(tensor)
        row = bytes_of(tensor)
    form = None if row is None else around(tensor.dtype, tuple(tensor.shape), tensor.stride())
    if row is None or form is None:
        torch.save(tensor, stream)
        return
    before, after = form
    stream.write(before)
    for piece in lane.pieces(row):
        stream.write(piece)
    stream.write(after)


def _settled(tensor: Tensor) -> Tensor:
    host = tensor.cpu().resolve_conj().resolve_neg()
    return host.contiguous() if host.layout is torch.strided else host


def _size(item: WriteItem) -> int:
    data = item.tensor_data
    return 0 if data is None else data.chunk.sizes.numel() * data.properties.dtype.itemsize
