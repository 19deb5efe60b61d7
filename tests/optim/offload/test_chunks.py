import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from lightning_ups.optim.offload.chunks import (
    Item,
    Options,
    in_parts,
    planned,
    stepping,
)


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
