"""Finds ranks that wait for one another because they run different modules, long before the collective times out.

Each rank records what it runs in a training step. If it records nothing for some seconds, a thread writes the records
to the store of the process group, and rank 0 compares them. Slow ranks have run less than others, in the same order;
ranks that wait for one another have run something different.
"""

import json
import logging
import threading
from collections.abc import Sequence
from itertools import count
from typing import Any

import torch.distributed as dist

from lightning_ups._compat.torch.fsdp.process_groups import shared_store

__all__ = ["StallWatch"]

PATIENCE_S = 10.0
_logger = logging.getLogger(__name__)


class StallWatch:
    """Checks, while open, whether ranks have stopped at different places of a training step.

    Args:
        remedy: What to do about it, for the message.
    """

    def __init__(self, remedy: str) -> None:
        self.remedy = remedy
        self.found: str | None = None  # the message, if ranks wait for one another
        self._steps = (0, list[str](), list[str]())  # number of the step, its records, and those of the previous step
        self._over: threading.Event | None = None  # set while there is a thread
        self._store: dist.Store | None = None

    def begin_step(self) -> None:
        """Called at the start of a training step."""
        number, now, _ = self._steps
        self._steps = number + 1, [], now

    def note(self, name: str) -> None:
        """Record that the current step runs ``name``."""
        self._steps[1].append(name)

    def open(self) -> None:
        """Start to watch; every rank must."""
        self._over = over = threading.Event()
        self.found, self._steps = None, (0, [], [])
        self._store = shared_store(f"lightning_ups/stalls/{next(_numbers)}")
        threading.Thread(target=self._watch, args=(over,), daemon=True, name="stalls").start()

    def close(self) -> None:
        """Stop watching."""
        if self._over is not None:
            self._over.set()
        self._over = self._store = None

    def explain(self, error: BaseException) -> None:
        """Add to an error of a collective that timed out why ranks wait for one another."""
        if self._over is not None and ("timed out" in str(error).lower() or "timeout" in str(error).lower()):
            error.add_note(self.found or f"If ranks ran different modules in a training step: {self.remedy}")

    def _watch(self, over: threading.Event) -> None:
        seen: Any = None
        while not over.wait(PATIENCE_S):
            number, now, before = self._steps
            if not number or (number, len(now)) != seen:
                seen = number, len(now)
                continue
            store = self._store
            if store is None:
                return
            try:
                store.set(str(dist.get_rank()), json.dumps([number, now, before]))
                if dist.get_rank() == 0 and (found := self._compared(store)):
                    self.found = f"{found} {self.remedy}"
                    _logger.error(self.found)
                    return
            except (RuntimeError, ValueError):  # the run has ended, and its store is gone
                return

    def _compared(self, store: dist.Store) -> str | None:
        number, now, before = self._steps
        for rank in range(1, dist.get_world_size()):
            if not store.check([str(rank)]):
                continue
            their_number, theirs, their_before = json.loads(store.get(str(rank)))
            pairs = {number: now, number - 1: before}, {their_number: theirs, their_number - 1: their_before}
            for step in sorted(pairs[0].keys() & pairs[1].keys()):
                if part := _parting(pairs[0][step], pairs[1][step]):
                    mine, other = part
                    return (
                        f"Ranks wait for one another: in the same training step rank 0 has run {mine}, and rank {rank}"
                        f" {other}."
                    )
        return None


def _parting(one: Sequence[str], other: Sequence[str]) -> tuple[str, str] | None:
    """Return where two ranks differ, or None if one has only run less than the other."""
    return next(((a, b) for a, b in zip(one, other, strict=False) if a != b), None)


_numbers = count()  # of fits in this process, the same on every rank
