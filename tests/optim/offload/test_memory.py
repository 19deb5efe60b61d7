import gc

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from lightning_ups.optim.offload import memory as offload_memory
from lightning_ups.optim.offload.memory import (
    Block,
    Memory,
    StreamedMemory,
    aligned,
    form_of,
    memory_of,
    pieces_of,
    plain_parts,
    rebuilt,
    runs_of,
    same_form,
)


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


CPU = torch.device("cpu")


class Counting(Memory):
    def __init__(self):
        super().__init__(CPU)
        self.released = []

    def release(self, memory):
        self.released.append(memory.nbytes)


TENSORS = {
    "matrix": torch.arange(12.0).reshape(3, 4),
    "transposed": torch.arange(12.0).reshape(3, 4).t(),
    "channels last": torch.arange(48.0).reshape(1, 3, 4, 4).contiguous(memory_format=torch.channels_last),
    "with gaps": torch.arange(24.0).reshape(4, 6)[:, ::2],
    "spread": torch.ones(1).expand(5),
    "flags": torch.tensor([True, False]),
    "low": torch.ones(3, dtype=torch.bfloat16),
    "number": torch.tensor(3.0),
    "empty": torch.ones(0, 4),
}


@pytest.mark.parametrize("resident", [False, True])
def test_tensors_of_any_form_lie_in_one_block(resident):
    memory = Memory(CPU)
    pieces = pieces_of([form_of(t) for t in TENSORS.values()], memory, slot=1024, resident=resident)
    assert len({piece.block for piece in pieces}) == 1
    for piece, tensor in zip(pieces, TENSORS.values(), strict=True):
        piece.kept().copy_(tensor)
    slot = torch.zeros(1024 + pieces[0].block.raw.nbytes, dtype=torch.uint8)
    for raw, start in runs_of(pieces):
        slot[start : start + raw.nbytes].copy_(raw)
    for piece, tensor in zip(pieces, TENSORS.values(), strict=True):
        for found in (piece.kept(), piece.loaded(slot)):
            assert torch.equal(found, tensor)
            assert found.dtype is tensor.dtype
    assert pieces[2].kept().is_contiguous(memory_format=torch.channels_last)


def test_what_lies_together_is_one_copy():
    forms = [form_of(torch.ones(n)) for n in (3, 500, 7)]
    memory = Memory(CPU)
    one = pieces_of(forms, memory, slot=0, resident=False)
    other = pieces_of(forms, memory, slot=aligned(one[0].block.raw.nbytes), resident=False)
    assert [(raw.nbytes, start) for raw, start in runs_of([*one, *other])] == [(3072, 0), (3072, 3072)]
    assert [(raw.nbytes, start) for raw, start in runs_of([one[0], one[2]])] == [(512, 0), (512, 2560)]


def test_a_tensor_in_a_block_is_saved_alone_and_outlives_it():
    memory = Counting()
    (piece,) = pieces_of([form_of(torch.ones(4))], memory, slot=0, resident=False)
    kept = piece.kept().fill_(3)
    assert kept.untyped_storage().nbytes() == 16
    del piece
    gc.collect()
    assert memory.released == [512]
    assert kept.sum() == 12


def test_a_block_is_released_once():
    memory = Counting()
    block = Block(memory, 64, resident=False)
    block.release()
    block.release()
    assert memory.released == [64]


def parts_of_a_shard():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = DTensor.from_local(torch.full((2, 3), float(dist.get_rank())), mesh, [Shard(0)])
    (local,) = plain_parts(whole)
    other = rebuilt(whole, iter([local + 1]))
    placed = (other.placements, other.device_mesh, other.shape) == (whole.placements, whole.device_mesh, whole.shape)
    return local.shape, placed, other.full_tensor().tolist(), same_form(whole, other), same_form(whole, local)


def test_a_shard_is_its_local_part(ranks):
    shape, placed, values, same, different = ranks(parts_of_a_shard)
    assert shape == (2, 3)
    assert placed
    assert values == [[1.0] * 3] * 2 + [[2.0] * 3] * 2
    assert same
    assert not different


def test_codes_and_scales_are_parts():
    from torchao.optim.subclass_8bit import OptimState8bit

    state = OptimState8bit.zeros((64, 64), signed=True, block_size=256)
    parts = plain_parts(state)
    assert [(p.dtype, p.numel()) for p in parts[:2]] == [(torch.uint8, 4096), (torch.float32, 16)]
    copy = rebuilt(state, iter([p.clone() for p in parts]))
    assert type(copy) is OptimState8bit
    assert torch.equal(copy.dequantize(), state.dequantize())
    assert same_form(copy, state)
