import random
from collections import UserDict
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_ups.transforms.sharding.one_batch import check_one_batch, share_random_state


def compared(kind):
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
    with pytest.raises(ValueError, match=r"Ranks 0 and 1.*tensor_parallel_size=2.*distributed_sampler_kwargs.*workers"):
        check_one_batch(batch, group=dist.group.WORLD)


@pytest.mark.parametrize("kind", ["values", "order of rows", "shape", "type", "nothing", "nested", "complex"])
def test_different_batches_are_refused_on_every_rank(ranks, kind):
    ranks(compared, kind)


@dataclass(frozen=True)
class Sample:
    x: torch.Tensor


def hidden(kind):
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


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", ["frozen", "packed", "nested", "jagged", "conjugate"])
def test_tensors_are_found_in_what_no_collection_is_made_of_anew(ranks, kind):
    ranks(hidden, kind)


def the_same():
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    x[0, 0] = torch.nan
    of_types = [x.to(dtype) for dtype in (torch.bfloat16, torch.float64, torch.complex64, torch.bool, torch.uint8)]
    batch = {"x": x.t(), "empty": torch.ones(0, 3), "number": torch.tensor(1.5), "of types": of_types, "name": "a"}
    check_one_batch((UserDict(batch), 0), group=dist.group.WORLD)


def test_the_same_batch_is_taken_whatever_is_in_it(ranks):
    ranks(the_same)


def drawn():
    torch.manual_seed(dist.get_rank())
    random.seed(dist.get_rank())
    share_random_state(dist.group.WORLD)
    found = [None, None]
    dist.all_gather_object(found, (torch.rand(3).tolist(), random.random()))
    return found


def test_random_numbers_go_on_as_those_of_the_first_rank(ranks):
    first, second = ranks(drawn)
    torch.manual_seed(0)
    random.seed(0)
    assert first == second == (torch.rand(3).tolist(), random.random())
