"""A second stream for tests on a CPU, as unkind as a real one may be."""

import torch

POISON = 1e30


class SlowLane:
    """Makes a copy only when training waits for it, or ``early``, at once; says what was queued in which order.

    Until training has waited its memory holds poison, so that whoever reads too early computes something else.
    """

    def __init__(self, pinned=True, early=False):
        self.device, self.pinned, self.early = torch.device("cpu"), pinned, early
        self.said, self.open, self.made, self.points = [], {}, {}, 0

    def is_pinned(self, source):
        return self.pinned

    def memory(self, like):
        target = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        target.fill_(POISON if like.is_floating_point() else -1)
        self.points += 1
        self.made[id(target)] = self.points
        self.said.append("memory")
        return target

    def mark(self):
        self.points += 1
        return self.points

    def copy(self, target, source, *, after, non_blocking):
        assert self.made[id(target)] < after, "work that still uses the memory may be behind the mark"
        self.points += 1
        self.open[self.points] = target, source.clone() if self.early else source
        self.said.append("copy")
        return self.points

    def join(self, copied):
        target, source = self.open.pop(copied)
        target.copy_(source)
        self.said.append("join")

    def wait(self, copied):
        assert copied not in self.open
        self.said.append("wait")

    def give_up(self, target):
        self.open = {point: copy for point, copy in self.open.items() if copy[0] is not target}
        self.said.append("give up")
