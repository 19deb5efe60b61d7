"""The format of a tensor in a file, apart from the tensor's bytes; and DCP's record of its position."""

import io
import sys
import threading
from functools import lru_cache
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.utils.serialization import config

_PATCHING = threading.Lock()  # before torch 2.12 a setting applies to all threads


@lru_cache(maxsize=8192)
def around(dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...]) -> tuple[bytes, bytes] | None:
    """Return what ``torch.save`` writes before and after a dense tensor's bytes; None if these are in several pieces.

    ``torch.save`` would copy the bytes from the host, and first compute a checksum that ``torch.load`` never reads. So
    it gets untouched memory, and what it writes of that is left out.
    """
    numel = torch.Size(size).numel()
    storage = torch.UntypedStorage(numel * dtype.itemsize)
    file = _AllBut(storage)
    with _PATCHING, config.patch({"save.compute_crc32": False}):  # type: ignore[attr-defined]
        torch.save(torch.empty(0, dtype=dtype).set_(storage, 0, size, stride), file)  # type: ignore[arg-type]
    return (bytes(file.before), bytes(file.after)) if file.met or not storage.nbytes() else None


class _AllBut(io.RawIOBase):
    """Keeps what is written, except the bytes of one storage."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._address, self._nbytes = storage.data_ptr(), storage.nbytes()
        self.before, self.after, self.met = bytearray(), bytearray(), False

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: Any) -> int:
        """Record ``data``, a view of memory."""
        if len(data) == self._nbytes and np.frombuffer(data, np.uint8).ctypes.data == self._address:
            self.met = True
        else:
            (self.after if self.met else self.before).extend(data)
        return len(data)


def template(file: IO[bytes]) -> tuple[Tensor, int] | None:
    """Return the tensor in a file, on the meta device, and the offset of its bytes.

    None for a file that contains anything but the bytes of one tensor, or contains them in another order.
    """
    file.seek(0)  # the reader's start
    reader: Any = torch._C.PyTorchFileReader(file)  # type: ignore[arg-type]
    if [name for name in reader.get_all_records() if name.startswith("data/")] != ["data/0"]:
        return None  # also a sparse tensor, whose indices torch would check without their values
    file.seek(0)
    with torch.serialization.skip_data():
        tensor = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(tensor, Tensor):
        return None
    if reader.has_record("byteorder") and reader.get_record("byteorder") != sys.byteorder.encode():
        return None
    if tensor.is_conj() or tensor.is_neg() or tensor.layout is not torch.strided or tensor.is_quantized:
        return None
    place = reader.get_record_offset("data/0") + tensor.storage_offset() * tensor.itemsize
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"), place


def noted(file: str, *, offset: int, length: int) -> Any:
    """Return DCP's record of a tensor in ``length`` bytes of ``file``."""
    return _StorageInfo(file, offset, length, None)
