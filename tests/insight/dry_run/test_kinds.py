import enum
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lightning_ups.insight.dry_run.kinds import (
    NotCopied,
    NotCopiedError,
    Uses,
    can_pickle,
    has_own_end,
    is_plain,
    is_shared,
    slots_of,
)


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


@pytest.mark.parametrize(
    "use",
    [next, iter, len, bool, int, float, list, lambda x: x(), lambda x: x.name, lambda x: x[0], lambda x: x + 1],
    ids=range(11),
)
def test_every_use_in_a_step_names_the_object(use):
    uses = Uses()
    with pytest.raises(NotCopiedError, match=r"self\.x, a generator"), uses.watched():
        use(NotCopied(uses, "self.x, a generator"))


def test_a_placeholder_may_be_held_and_compared():
    uses = Uses()
    held = NotCopied(uses, "")
    with uses.watched():
        assert held is not None
        assert held in [held]
        assert not hasattr(held, "__torch_function__")
    assert iter(held) is held.close() is held


@pytest.mark.parametrize("then", [lambda: None, lambda: 1 / 0], ids=["goes on", "fails"])
def test_a_step_cannot_hide_the_error(then):
    uses = Uses()

    def step():
        try:
            NotCopied(uses, "self.x").name = 1
        except RuntimeError:
            then()

    with pytest.raises(NotCopiedError, match=r"self\.x"), uses.watched():
        step()


def test_another_error_is_not_replaced():
    with pytest.raises(ZeroDivisionError), Uses().watched():
        1 / 0  # noqa: B018
