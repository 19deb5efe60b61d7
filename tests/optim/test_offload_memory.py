import pytest
import torch

from lightning_ups.optim import offload_memory
from lightning_ups.optim.offload_memory import PAGE, Memory, StreamedMemory, memory_of, own_pages


def test_a_device_whose_memory_is_the_hosts_copies_at_once():
    memory = memory_of(torch.device("cpu"))
    assert type(memory) is Memory
    host, room = memory.host(16), memory.room(16)
    host.fill_(3)
    memory.wait(memory.load([(room, host)], after=[memory.mark()]))
    assert room.sum() == 48
    room.fill_(5)
    memory.reach(memory.store([(host, room)]))
    assert host.sum() == 80
    memory.settle()
    memory.release(host)
    assert host.sum() == 80


def test_memory_that_cannot_be_pinned_is_told_with_the_cure(monkeypatch):
    def refuses(memory):
        raise RuntimeError("CUDA could not pin host memory")

    monkeypatch.setattr(offload_memory, "pin", refuses)
    memory = object.__new__(StreamedMemory)
    with pytest.raises(RuntimeError, match=r"or raise `ulimit -l`\.$") as error:
        memory.host(2**20)
    assert "1 MiB of host memory" in str(error.value)


def test_two_buffers_share_no_page():
    pages = [own_pages(n) for n in (1, 4096, 5000, 10)]
    starts = [page.data_ptr() for page in pages]
    assert all(start % PAGE == 0 for start in starts)
    assert [page.nbytes for page in pages] == [PAGE, PAGE, 2 * PAGE, PAGE]


@pytest.mark.gpu(count=1)
def test_copies_run_beside_the_work_and_in_order():
    memory = memory_of(torch.device("cuda", 0))
    assert type(memory) is StreamedMemory
    host, back, room = memory.host(2**24), memory.host(2**24), memory.room(2**24)
    host.fill_(3)
    memory.wait(memory.load([(room, host)], after=[memory.mark()]))
    room.add_(1)
    memory.reach(memory.store([(back, room)], after=[memory.mark()]))
    assert int(back.min()) == int(back.max()) == 4
    memory.release(host)
    memory.release(back)
