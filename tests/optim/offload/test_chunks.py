import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from lightning_ups.optim.offload.chunks import (
    Chunk,
    Item,
    Options,
    in_parts,
    is_large,
    nbytes_of,
    planned,
    stepping,
)
from tests.optim.offloading import LateMemory


def items(*sizes):
    return [Item(0, p, p) for p in (nn.Parameter(torch.arange(float(n))) for n in sizes)]


def test_chunks_are_in_order_and_of_the_size():
    found = items(10, 20, 30, 1000, 5)
    nbytes = {item: item.parameter.numel() for item in found}
    chunks = planned(found, nbytes=nbytes, chunk_bytes=35, resident=[])
    assert [[nbytes[item] for item in chunk.items] for chunk in chunks] == [[10, 20], [30], [1000], [5]]
    stay = planned(found, nbytes=nbytes, chunk_bytes=2000, resident=[found[1].parameter])
    assert [(len(chunk.items), chunk.resident) for chunk in stay] == [(1, False), (1, True), (3, False)]


def test_parts_begin_at_multiples_and_cover_all():
    parameter = nn.Parameter(torch.arange(5000.0).reshape(50, 100))
    parts = in_parts(0, parameter, parameter, parts=4)
    assert [part.part for part in parts] == [slice(0, 2048), slice(2048, 4096), slice(4096, 5000)]
    assert [part.is_last for part in parts] == [False, False, True]
    assert torch.equal(torch.cat([part.of(parameter) for part in parts]), parameter.flatten())
    (whole,) = in_parts(0, nn.Parameter(parameter.detach().t()), parameter, parts=4)  # not in the order of its elements
    assert whole.part is None
    assert len(in_parts(0, parameter, parameter, parts=1)) == 1


def test_what_is_large():
    assert is_large(torch.ones(2))
    assert not any(map(is_large, (torch.tensor(3.0), torch.ones(0), 3, None, "a")))
    assert nbytes_of(torch.ones(3)) == 12
    assert nbytes_of(3) == 0


def test_a_chunk_keeps_what_it_is_given_and_takes_what_a_step_made():
    memory, (one, two) = LateMemory(), items(10, 300)
    chunk = Chunk([one, two], resident=False)
    chunk.place({(one, "a"): torch.ones(10), (two, "a"): torch.ones(300), (two, "b"): torch.zeros(3)}, memory)
    one.names, two.names, two.others = ["a"], ["a", "count", "b"], {"count": 7}
    assert chunk.nbytes_kept == 4 * 313
    slot = memory.room(chunk.nbytes)
    memory.reach(memory.load(chunk.copies(slot)))
    before = chunk.state(two, slot)
    assert list(before) == ["a", "b", "count"]
    after = {"a": before["a"].mul_(2), "count": 8, "b": torch.full((3,), 5.0), "c": torch.full((2,), 6.0)}
    fresh = chunk.take(two, after, before)
    assert list(fresh) == [(two, "c")]
    memory.reach(memory.store([(kept, loaded) for loaded, kept in chunk.copies(slot)]))
    chunk.place(fresh, memory)
    kept = chunk.kept(two)
    assert {name: float(value.sum()) if is_large(value) else value for name, value in kept.items()} == {
        "a": 600.0,
        "count": 8,
        "b": 15.0,
        "c": 12.0,
    }
    chunk.take(two, {"a": after["a"]}, before)
    assert list(chunk.kept(two)) == ["a"]
    chunk.clear()
    assert chunk.nbytes == chunk.nbytes_kept == 0


def test_the_parts_of_one_parameter_keep_one_tensor():
    memory, parameter = LateMemory(), nn.Parameter(torch.zeros(30, 100))
    parts = in_parts(0, parameter, parameter, parts=3)
    chunks = planned(parts, nbytes=dict.fromkeys(parts, 1), chunk_bytes=100, resident=[])
    assert len(chunks) == 3
    for number, chunk in enumerate(chunks):
        (item,) = chunk.items
        chunk.place({(item, "a"): torch.full((item.part.stop - item.part.start,), float(number))}, memory)
        item.names = ["a"]
    whole = chunks[0].kept(parts[0])["a"]
    assert whole.shape == parameter.shape
    assert whole.flatten()[[0, 1023, 1024, 2047, 2048, 2999]].tolist() == [0, 0, 1, 1, 2, 2]
    assert chunks[1].state(parts[1], None)["a"].data_ptr() == whole.flatten()[1024:].data_ptr()


def test_a_step_sees_what_stands_there_and_nothing_else():
    ones, others = [nn.Parameter(torch.ones(2)) for _ in range(2)], [nn.Parameter(torch.ones(2))]
    optimizer = AdamW([{"params": ones}, {"params": others, "lr": 0.5}], lr=0.1)
    stand_in = nn.Parameter(torch.zeros(2))
    with stepping(optimizer, {stand_in: 1}, {stand_in: {"step": 3}}):
        assert [group["params"] for group in optimizer.param_groups] == [[stand_in]]
        assert optimizer.param_groups[0]["lr"] == 0.5
        assert optimizer.state[stand_in] == {"step": 3}
    with pytest.raises(KeyError), stepping(optimizer, {stand_in: 0}, {stand_in: {}}):
        raise KeyError(optimizer.state.get(stand_in, "nothing"))
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 1]
    assert optimizer.param_groups[0]["params"][0] is ones[0]


def test_options_change_once_however_many_chunks_there_are():
    optimizer = SGD([{"params": [nn.Parameter(torch.ones(1))]}, {"params": [nn.Parameter(torch.ones(1))]}], lr=1.0)
    options = Options(optimizer)
    for _ in range(3):
        with options.once([0]):
            group = optimizer.param_groups[0]
            group["lr"] *= 0.5
            group["count"] = group.get("count", 0) + 1
    with options.once([1]):
        pass
    options.keep()
    assert [(group["lr"], group.get("count")) for group in optimizer.param_groups] == [(0.5, 1), (1.0, None)]
