import random
from collections import UserDict
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_ups.transforms.sharding.replicated import (
    BufferSync,
    average_gradients,
    check_one_batch,
    give_first,
    share_random_state,
)
from tests.strategies.cases import two_ranks


@two_ranks
@pytest.mark.parametrize(("unused", "last"), [(False, None), (True, [0.5])])
def test_gradients_are_the_mean_in_their_own_type(unused, last):
    rank = dist.get_rank()
    parameters = [
        nn.Parameter(torch.tensor(1.0)),
        nn.Parameter(torch.ones(2, dtype=torch.complex64)),
        nn.Parameter(torch.ones(3, dtype=torch.float64)),
        nn.Parameter(torch.ones(1)),
    ]
    for p in parameters[:3]:
        p.grad = torch.full_like(p, rank + (1j * rank if p.is_complex() else 0))
    if unused and rank == 0:
        parameters[3].grad = torch.ones(1)
    for _ in range(2):  # a second time changes nothing
        average_gradients(parameters, group=dist.group.WORLD, unused=unused)
    gradients = [None if p.grad is None else p.grad.tolist() for p in parameters]
    assert gradients == [0.5, [0.5 + 0.5j] * 2, [0.5] * 3, last]


@two_ranks
def test_a_sparse_gradient_of_one_rank_and_none_of_any():
    p, idle = nn.Parameter(torch.ones(4, 2)), nn.Parameter(torch.ones(1))
    if dist.get_rank() == 0:
        p.grad = torch.sparse_coo_tensor([[1]], torch.ones(1, 2), (4, 2), check_invariants=True)
    average_gradients([p, idle], group=dist.group.WORLD, unused=True)
    assert p.grad.to_dense().tolist() == [[0.0, 0.0], [0.5, 0.5], [0.0, 0.0], [0.0, 0.0]]
    assert idle.grad is None


@two_ranks
def test_the_first_ranks_values_whatever_the_strides():
    rank = dist.get_rank()
    memory = torch.arange(8.0).view(4, 2) + 10 * rank
    tensors = [
        memory[:, 0],  # whose memory is the other column's, too
        (torch.arange(4.0).view(2, 2) + 10 * rank).t(),
        torch.full((1,), float(rank)).expand(3),
        torch.full((2,), complex(rank, 1)),
        torch.zeros(0),
    ]
    give_first(tensors, group=dist.group.WORLD)
    assert [t.tolist() for t in tensors] == [[0, 2, 4, 6], [[0, 2], [1, 3]], [0, 0, 0], [1j, 1j], []]
    assert memory[:, 1].tolist() == [each + 10 * rank for each in (1, 3, 5, 7)]


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("table", torch.arange(3.0))
        self.register_buffer("sometimes", torch.zeros(()))

    def step(self):
        rank = dist.get_rank()
        self.steps += rank + 1
        self.norm.running_mean += rank
        if rank == 1:
            self.sometimes += 1  # on one rank only: all must still send the same


@two_ranks
def test_what_changes_is_the_first_ranks():
    model = Counts()
    model.table += dist.get_rank()  # as an earlier run may have left it
    sync = BufferSync(model, group=dist.group.WORLD)
    for _ in range(3):
        sync()
        every = [None] * 2
        dist.all_gather_object(every, {name: b.tolist() for name, b in model.named_buffers()})
        assert every[0] == every[1]
        model.step()
        sync.note_step()
    assert every[0]["steps"] == 2
    norm = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert set(sync._names) == {"steps", "sometimes", *norm}


@two_ranks
@pytest.mark.parametrize("kind", ["values", "order of rows", "shape", "type", "nothing", "nested", "complex"])
def test_different_batches_are_refused_on_every_rank(kind):
    rank, x = dist.get_rank(), torch.arange(12.0).reshape(4, 3)
    other = {
        "values": x + 1e-6,
        "order of rows": x.flip(0),
        "shape": x[:2],
        "type": x.half(),
        "nothing": None,
        "nested": x * 2,
        "complex": x + 1j,
    }[kind]
    own = other if rank else (x + 2j if kind == "complex" else x)
    batch = UserDict(x={"deep": [own]}, y=torch.tensor(3)) if kind == "nested" else (torch.ones(2), own)
    with pytest.raises(ValueError, match=r"Ranks 0 and 1.*tensor_parallel_size=2.*distributed_sampler_kwargs"):
        check_one_batch(batch, group=dist.group.WORLD)


@dataclass(frozen=True)
class Sample:
    x: torch.Tensor


@two_ranks
@pytest.mark.parametrize("kind", ["frozen", "packed", "nested", "jagged", "conjugate"])
def test_tensors_are_found_in_what_no_collection_is_made_of_anew(kind):
    x = torch.arange(12.0).reshape(4, 3)
    own = x + 1e-6 if dist.get_rank() else x
    batch = {
        "frozen": lambda: Sample(own),
        "packed": lambda: nn.utils.rnn.pack_sequence([own, own[:2]]),
        "nested": lambda: torch.nested.nested_tensor([own, own[:2]]),
        "jagged": lambda: torch.nested.nested_tensor([own, own[:2]], layout=torch.jagged),
        "conjugate": lambda: torch.complex(own, own).conj(),
    }[kind]()
    with pytest.raises(ValueError, match="different batches"):
        check_one_batch((batch, 0), group=dist.group.WORLD)


@two_ranks
def test_the_same_batch_is_taken_whatever_is_in_it():
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    x[0, 0] = torch.nan
    of_types = [x.to(dtype) for dtype in (torch.bfloat16, torch.float64, torch.complex64, torch.bool, torch.uint8)]
    batch = {"x": x.t(), "empty": torch.ones(0, 3), "number": torch.tensor(1.5), "of types": of_types, "name": "a"}
    check_one_batch((UserDict(batch), 0), group=dist.group.WORLD)


@two_ranks
def test_random_numbers_continue_as_those_of_the_first_rank():
    torch.manual_seed(dist.get_rank())
    random.seed(dist.get_rank())
    share_random_state(dist.group.WORLD)
    found = torch.rand(3).tolist(), random.random()
    torch.manual_seed(0)
    random.seed(0)
    assert found == (torch.rand(3).tolist(), random.random())
