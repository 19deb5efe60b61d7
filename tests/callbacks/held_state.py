"""Modules that hold what a step advances, as users write them, and which remember what they saw."""

import collections
import functools
import itertools
import logging
import random
import threading
import weakref
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import nn


class Holding(LightningModule):
    """One layer; ``advance`` draws a number from what it holds, and takes part in the loss."""

    def __init__(self, hold, advance):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.seen = nn.Linear(8, 8), []
        self.held, self.advance_ = hold(), advance
        self.owner = [self]

    def training_step(self, batch, index):
        drawn = float(self.advance_(self.held))
        loss = self.layer(batch + drawn / 8).square().mean()
        self.seen.append((drawn, loss.detach()))
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Slotted:
    __slots__ = ("__weakref__", "count", "missing")

    def __init__(self):
        self.count = 0

    def up(self):
        self.count += 1
        return self.count


class Uncopied:
    """Forbids all copying, and writing from outside."""

    def __init__(self):
        vars(self)["count"] = 0

    def __setattr__(self, name, value):
        raise AttributeError(name)

    def up(self):
        vars(self)["count"] += 1
        return self.count

    def _no(self, *_):
        raise TypeError("no copies")

    __copy__ = __deepcopy__ = __reduce_ex__ = __reduce__ = __getstate__ = _no


@dataclass(frozen=True, slots=True)
class Record:
    values: list = field(default_factory=lambda: [1.0])

    def up(self):
        self.values.append(self.values[-1] + 1)
        return self.values[-1]


class Node:
    """One of two that hold each other, weakly as well."""

    def __init__(self):
        self.other, self.count = None, 0

    def up(self):
        assert self.other.other is self
        assert self.weak() is self.other
        self.other.count += 1
        return self.other.count


class Stack(list):
    def __init__(self, name):
        super().__init__([0.0])
        self.name = name


def cycle():
    one, two = Node(), Node()
    one.other, two.other, one.weak, two.weak = two, one, weakref.ref(two), weakref.ref(one)
    return one


def closure():
    numbers = random.Random(3)
    count = 0

    def draw():
        nonlocal count
        count += 1
        return numbers.random() + count

    return draw


def locked():
    return SimpleNamespace(lock=threading.RLock(), count=0, log=logging.getLogger("of.the.user"))


def up_locked(held):
    with held.lock:
        held.count += 1
        held.log.warning("count %d", held.count)
        return held.count


def grown(stack):
    stack.append(stack[-1] + 1)
    return stack[-1]


def counted(counter):
    counter["step"] += 1
    return counter["step"]


def turned(deque):
    deque.rotate(1)
    return deque[0]


def filled(groups):
    groups["a"].append(1)
    return len(groups["a"])


def written(array):
    array += 1
    return array.flat[0]


def of_torch(generator):
    return torch.rand(1, generator=generator, device="cpu").to("cpu").sum()


HOLDERS = {
    "numpy generator": (lambda: np.random.default_rng(1), lambda rng: rng.random()),
    "python random": (lambda: random.Random(1), lambda rng: rng.random()),
    "torch generator": (lambda: torch.Generator().manual_seed(1), of_torch),
    "bound method": (lambda: random.Random(1).random, lambda draw: draw()),
    "iterator": (lambda: iter(range(100)), next),
    "cycle": (lambda: itertools.cycle([1.0, 2.0, 3.0]), next),
    "deque": (lambda: collections.deque([1.0, 2.0, 3.0], maxlen=3), turned),
    "defaultdict": (lambda: collections.defaultdict(list), filled),
    "a list's subclass": (lambda: Stack("a"), grown),
    "slots": (Slotted, Slotted.up),
    "forbids copies": (Uncopied, Uncopied.up),
    "dataclass": (Record, Record.up),
    "cycle of objects": (cycle, Node.up),
    "namespace": (lambda: SimpleNamespace(inner={"a": [Slotted()]}), lambda held: held.inner["a"][0].up()),
    "partial": (lambda: functools.partial(grown, [0.0]), lambda call: call()),
    "closure": (closure, lambda draw: draw()),
    "lock and logger": (locked, up_locked),
    "weak reference": (
        lambda: [slotted := Slotted(), weakref.ref(slotted)],
        lambda held: held[0].up() + held[1]().count,
    ),
    "array": (lambda: np.zeros((2, 3)), written),
}


class ImagePool:
    """CycleGAN's, shortened."""

    def __init__(self, size):
        self.size, self.images = size, []

    def query(self, images):
        result = []
        for image in images.detach().split(1):
            if len(self.images) < self.size:
                self.images.append(image)
                result.append(image)
            elif random.random() > 0.5:
                place = random.randrange(self.size)
                result.append(self.images[place].clone())
                self.images[place] = image
            else:
                result.append(image)
        return torch.cat(result)


class Gan(LightningModule):
    """Two networks that optimize by hand, and a pool of images for the second."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.generator, self.critic = nn.Linear(8, 8), nn.Linear(8, 1)
        self.pool, self.seen = ImagePool(6), []

    def training_step(self, batch, index):
        first, second = self.optimizers()
        made = self.generator(batch)
        loss = -self.critic(made).mean()
        self._step(first, loss)
        self._step(second, self.critic(self.pool.query(made)).square().mean())
        self.seen.append(loss.detach())

    def _step(self, optimizer, loss):
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.Adam(part.parameters(), lr=0.01) for part in (self.generator, self.critic)]
