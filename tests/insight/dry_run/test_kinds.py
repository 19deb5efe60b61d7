import enum
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lightning_ups.insight.dry_run.kinds import can_pickle, has_own_end, is_plain, is_shared, slots_of


class Plain: ...


class Slots(Plain):
    __slots__ = ("__hidden", "a")


class Color(enum.Enum):
    RED = 1


class Ending:
    def __del__(self): ...


class Number(int): ...


@pytest.mark.parametrize(
    ("holds", "kinds", "others"),
    [
        (
            is_plain,
            [Plain, Slots, SimpleNamespace, torch.optim.SGD, threading.Event],
            [Number, zip, np.random.Generator, type(x for x in ()), ValueError, torch.Generator],
        ),
        (is_shared, [Color, torch.distributed.DeviceMesh], [torch.optim.SGD]),
        (has_own_end, [Ending, threading.Event], [Plain]),
        (can_pickle, [Number, np.random.PCG64], [Plain]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_kinds_of_classes(holds, kinds, others):
    assert all(map(holds, kinds))
    assert not any(map(holds, others))


def test_private_slots_are_found():
    assert len(slots_of(Slots)) == 2
