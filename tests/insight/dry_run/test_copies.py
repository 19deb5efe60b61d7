"""Copies of single objects. What they are for is tested in tests/callbacks/test_held_state.py."""

import collections
import functools
import gc
import itertools
import re
import types
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from lightning_ups._compat.torch.fake_tensors import FakeTensor, fake_mode
from lightning_ups.insight.dry_run.copies import FakeCopies
from lightning_ups.insight.dry_run.kinds import NotCopied, NotCopiedError
from lightning_ups.insight.throughput import step_flops


def copy_of(value):
    return FakeCopies(mode=fake_mode()).copy(value, "self.x")


@pytest.mark.parametrize(
    "value",
    [
        None,
        "text",
        torch.float32,
        torch.device("cpu"),
        re.compile("a"),
        np.float32(1),
        nn.functional.relu,
        nn.Linear,
        len,
        np,
        collections.Counter,
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_immutable_objects_are_shared(value):
    assert copy_of(value) is value


@pytest.mark.parametrize(
    "make",
    [
        lambda: iter([1, 2, 3]),
        lambda: iter({1: 2, 3: 4}),
        lambda: iter({1, 2, 3}),
        lambda: iter([1, 2, 3].pop, 1),
        lambda: re.finditer("a", "aaa"),
        lambda: filter(None, [1, 0, 2]),
        lambda: itertools.chain([1], iter([2, 3])),
        lambda: itertools.islice(itertools.count(), 5),
        lambda: itertools.tee([1, 2, 3])[0],
        lambda: itertools.groupby([1, 1, 2]),
    ],
)
@pytest.mark.filterwarnings("ignore:Pickle, copy, and deepcopy support:DeprecationWarning")
def test_copying_an_iterator_does_not_advance_it(make):
    iterator, fresh = make(), make()
    next(iterator), next(fresh)
    copied = copy_of(iterator)
    if not isinstance(copied, NotCopied):
        next(copied)
    assert [repr(x)[:9] for x in iterator] == [repr(x)[:9] for x in fresh]


def test_functions_that_share_a_variable_share_it_in_their_copies():
    count = 0

    def up():
        nonlocal count
        count += 1

    def read(*, offset=[0]):  # noqa: B006
        offset[0] += 1
        return count, offset[0]

    one, two = copy_of([up, read])
    one()
    assert (two(), count, read()) == ((1, 1), 0, (0, 1))


def test_copies_are_not_compiled_and_do_not_use_caches():
    class Held:
        def __init__(self):
            self.scaled, self.calls = functools.lru_cache(self.scale), 0
            self.compiled = torch.compile(self.scale, backend="eager")

        def scale(self, by):
            self.calls += 1
            return by

    held = Held()
    copied = copy_of(held)
    assert [copied.scaled(2), copied.scaled(2), copied.compiled(3)] == [2, 2, 3]
    assert (copied.calls, held.calls, held.scaled.cache_info().currsize) == (3, 0, 0)


@pytest.mark.parametrize(
    "value",
    [
        collections.OrderedDict(a=[1]),
        collections.deque([[1]], maxlen=2),
        collections.namedtuple("Pair", "a b")([1], 2),
        types.MappingProxyType({"a": [1]}),
        torch.max(torch.ones(2, 2), 0),
        collections.ChainMap({"a": 1}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_containers_keep_their_class(value):
    copied = copy_of(value)
    assert type(copied) is type(value)
    assert copied is not value
    if not isinstance(value, torch.return_types.max):
        assert copied == value


def test_a_long_array_becomes_a_read_only_view():
    array = np.arange(2**18)
    copied = copy_of(array)
    assert np.shares_memory(copied, array)
    with pytest.raises(ValueError, match="read-only"):
        copied[0] = 1


def test_an_error_in_a_copied_class_does_not_stop_counting():
    class Hashed:
        def __hash__(self):
            raise ValueError("not now")

    held = object.__new__(Hashed)
    batch = {"x": torch.ones(1, 2), "held": {"a": held}}
    assert step_flops(nn.Linear(2, 2), batch, step=lambda m, b: m(b["x"]).sum()).model > 0


def test_a_module_with_a_del_method_is_not_copied():
    class Ending(nn.Linear):
        ended = 0

        def __del__(self):
            Ending.ended += 1

    model = nn.Sequential(Ending(2, 2))
    with pytest.raises(NotCopiedError, match=r"self.0, an Ending, whose __del__ would"):
        step_flops(model, torch.ones(1, 2), step=lambda copied, x: copied(x).sum())
    with pytest.raises(NotCopiedError, match="self, an Ending"):
        step_flops(model[0], torch.ones(1, 2), step=lambda copied, x: copied(x).sum())
    assert Ending.ended == 0


def test_nothing_of_the_run_is_kept():
    class Own(nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.own = [self]

    gc.collect()
    gc.disable()
    try:
        batch = {"x": torch.ones(1, 2), "ids": torch.ones(3, dtype=torch.long)}
        left = [weakref.ref(tensor) for tensor in batch.values()]
        step_flops(Own(), batch, step=lambda copied, batch: copied(batch["x"]).sum())
        del batch
        assert [reference() for reference in left] == [None, None]
    finally:
        gc.enable()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight
        self.a.bias.requires_grad_(False)
        self.a.weight.no_decay = True
        self.register_buffer("table", torch.zeros(3, dtype=torch.int32))
        self.loose = [torch.zeros(2)]
        self.trainer = object()

    def forward(self, x):
        return self.b(self.a(x + torch.randn(x.shape)))


def test_shapes_dtypes_ties_and_flags_of_a_module_are_kept():
    module, copies = Tied(), FakeCopies(mode=fake_mode())
    copies.keep(module.trainer, None)
    other = copies.copy(module)
    for name, p in module.named_parameters():
        fake = other.get_parameter(name)
        assert isinstance(fake, FakeTensor)
        assert isinstance(fake, nn.Parameter)
        assert (fake.shape, fake.dtype, fake.requires_grad) == (p.shape, p.dtype, p.requires_grad)
    assert other.a.weight is other.b.weight
    assert other.a.weight.no_decay is True
    assert isinstance(other.table, FakeTensor)
    assert isinstance(other.loose[0], FakeTensor)
    assert other.trainer is None


@pytest.mark.parametrize("built_on", ["cpu", "meta"])
@pytest.mark.parametrize("mode", [fake_mode(), None])
def test_a_copied_module_computes(built_on, mode):
    with torch.device(built_on):
        module = Tied()
    other = FakeCopies(mode=mode, dtype=torch.bfloat16).copy(module)
    with mode or torch.device("meta"):
        other(torch.empty(2, 4, dtype=torch.bfloat16)).float().sum().backward()
    assert other.a.weight.grad.dtype is other.b.bias.dtype is torch.bfloat16
    assert {p.grad for p in module.parameters()} == {None}
    assert module.a.weight.device.type == built_on
