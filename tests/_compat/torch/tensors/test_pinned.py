import resource
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from lightning_ups._compat.torch.tensors import pinned as pinned_module
from lightning_ups._compat.torch.tensors.pinned import PAGE, _check, own_pages, pinned, unpin


def test_memory_of_the_size_that_was_asked_for():
    memory = pinned(1000)
    assert memory.nbytes == 1000
    memory.fill_(3)
    assert memory.sum() == 3000
    unpin(memory)


@pytest.mark.gpu(count=1)
def test_it_is_pinned_where_there_is_a_gpu():
    memory = pinned(1000)
    assert memory.is_pinned()
    copied = torch.arange(250, dtype=torch.int32, device="cuda").view(torch.uint8)
    memory.copy_(copied, non_blocking=True)
    torch.cuda.synchronize()
    assert memory.view(torch.int32)[-1] == 249
    unpin(memory)
    assert not memory.is_pinned()


@pytest.mark.parametrize("freed", [False, True])
def test_it_is_unpinned_on_the_gpu_that_it_was_pinned_on(monkeypatch, freed):
    """Memory is freed by whichever thread lets go of it last, and that one may have chosen no GPU."""
    current, calls = [3], []

    @contextmanager
    def device(index):
        current.append(index)
        yield
        current.pop()

    note = lambda *_: calls.append(current[-1]) or 0  # noqa: E731
    runtime = SimpleNamespace(cudaHostRegister=note, cudaHostUnregister=note)
    monkeypatch.setattr(pinned_module, "_runtime", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", device)
    memory = pinned(100)
    current[:] = [0]
    if freed:
        del memory
    else:
        unpin(memory)
    assert calls == [3, 3]


def test_an_error_of_cuda_is_told():
    with pytest.raises(RuntimeError, match=r"save synchronously \(async_save=False\)\.$"):
        _check(2, 2**20)


@pytest.mark.gpu(count=1)
def test_what_was_freed_can_be_pinned_again_and_small_pieces_share_no_page():
    for _ in range(20):  # the allocator hands out the same places again
        pieces = [pinned(100) for _ in range(8)]
        assert all(piece.is_pinned() for piece in pieces)
        del pieces


def test_large_memory_is_there_before_it_is_pinned():
    pages = own_pages(2**28 + 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    pages[::PAGE] = 1
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert pages.nbytes == 2**28 + PAGE
    assert pages.data_ptr() % PAGE == 0
    assert faults < 2**28 / PAGE / 10, "each page was used before"


def test_large_memory_goes_with_its_last_user():
    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * PAGE

    pages = own_pages(2**28)
    held = resident()
    part = pages[:100]
    del pages
    assert part.sum() == 0
    assert held - resident() < 2**27, "a part keeps it"
    del part
    assert held - resident() > 2**27
