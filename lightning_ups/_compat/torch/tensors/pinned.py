"""Pinned host memory of exactly the requested size."""

import mmap
import threading
import weakref
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

PAGE = 4096
_LARGE = 16 * 2**20
_THREADS = 8


def pinned(nbytes: int) -> Tensor:
    """Return ``nbytes`` of host memory; if there is a GPU, pinned until it is freed or passed to `unpin`.

    Raises:
        RuntimeError: If CUDA cannot pin that much.
    """
    if not nbytes or not torch.cuda.is_available():
        return torch.empty(nbytes, dtype=torch.uint8)
    # Not `pin_memory=True`: torch's allocator rounds up to a power of two, which costs up to half of a large buffer.
    pages, device = own_pages(nbytes), torch.cuda.current_device()
    _check(_runtime().cudaHostRegister(pages.data_ptr(), pages.nbytes, 0), nbytes)
    # With its own storage: torch considers a tensor pinned if its storage begins with pinned memory.
    memory = torch.frombuffer(pages.numpy(), dtype=torch.uint8, count=nbytes)
    # Memory that is freed while pinned could not be pinned again by its next user.
    release = weakref.finalize(memory, _unregister, pages.data_ptr(), device)
    release.atexit = False
    memory._unpin = release  # type: ignore[attr-defined]
    return memory


def unpin(memory: Tensor) -> None:
    """Undo `pinned`; the memory stays allocated."""
    if (release := getattr(memory, "_unpin", None)) is not None:
        release()


def own_pages(nbytes: int) -> Tensor:
    """Return whole pages of host memory that contain nothing else: a page can be pinned only once."""
    whole = -(-nbytes // PAGE) * PAGE
    if whole >= _LARGE and hasattr(mmap, "MAP_ANONYMOUS"):  # not on Windows
        return _there_already(whole)
    memory = torch.empty(whole + PAGE, dtype=torch.uint8)
    start = -memory.data_ptr() % PAGE
    return memory[start : start + whole]


def _there_already(nbytes: int) -> Tensor:
    # The operating system allocates and clears pages at their first use. CUDA would touch them one after the other in
    # one thread, which takes most of the time of pinning; here several threads do, and request huge pages.
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    pages = np.frombuffer(memory, dtype=np.uint8)
    share = -(-nbytes // (_THREADS * PAGE)) * PAGE

    def use(start: int) -> None:
        pages[start : start + share : PAGE] = 0  # numpy releases the GIL

    threads = [threading.Thread(target=use, args=(start,)) for start in range(0, nbytes, share)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return torch.from_numpy(pages)


def _unregister(address: int, device: int) -> None:
    # Whichever thread frees the memory, it must not initialize the first GPU for this.
    with torch.cuda.device(device):
        _check(_runtime().cudaHostUnregister(address), 0)


def _runtime() -> Any:
    return torch.cuda.cudart()


def _check(error: int, nbytes: int) -> None:
    if int(error) != 0:
        raise RuntimeError(
            f"CUDA could not pin {nbytes / 2**20:.0f} MiB of host memory (error {int(error)})."
            " The memory of the machine, or the limit of what may be locked of it, is too small."
            " Raise `ulimit -l`, or ask for less: of a checkpoint, save synchronously (async_save=False)."
        )
