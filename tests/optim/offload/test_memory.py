import pytest
import torch

from lightning_ups.optim.offload import memory as offload_memory
from lightning_ups.optim.offload.memory import Memory, StreamedMemory, memory_of


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

    monkeypatch.setattr(offload_memory, "pinned", refuses)
    memory = object.__new__(StreamedMemory)
    with pytest.raises(RuntimeError, match=r"or raise `ulimit -l`\.$") as error:
        memory.host(2**20)
    assert "1 MiB of host memory" in str(error.value)
    assert "ActivationOffload(every_k=...)" in str(error.value)  # which takes of it too, and has no `resident`
    assert "state of the optimizer" not in str(error.value)


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
