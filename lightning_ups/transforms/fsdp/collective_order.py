"""Finds ranks that run different modules: at the next poll, or when they wait for one another.

Each rank records what it runs in a training step. If it records nothing for some seconds, a thread writes the records
to the store of the process group, and rank 0 compares them. Slow ranks have run less than others, in the same order;
ranks that wait for one another have run something different.
"""

import json
import logging
import threading
from collections.abc import Iterable
from contextlib import ExitStack
from itertools import count
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import nn

from lightning_ups._compat.torch.fsdp.process_groups import shared_store
from lightning_ups._compat.torch.tensors.autograd import hidden_from_dynamo
from lightning_ups.transforms.sharding import StepState

PATIENCE_S = 10.0
_logger = logging.getLogger(__name__)
_numbers = count()  # of fits in this process, the same on every rank


class CollectiveOrder:
    """Records which modules training steps call first, and which gradients are reduced, to find ranks that differ.

    Only the first call of a module in a step counts: whether a later call gathers again depends on what is kept.

    Args:
        names: Names of the modules whose calls gather.
        remedy: What to do if ranks differ, for messages.
        undo: Removes the hooks.

    Attributes:
        checksum: The checksum of all records; ranks with different checksums have run something different.
    """

    def __init__(self, names: Iterable[tuple[str, nn.Module]], *, remedy: str, undo: ExitStack) -> None:
        self.checksum = 0
        self._remedy, self._found = remedy, ""  # the second: a message, if ranks wait for one another
        self._called, self._is_on = set[nn.Module](), False
        self._records = (0, list[str](), list[str]())  # number of the step, its records, and those of the one before
        self._over: threading.Event | None = None  # not None while there is a thread
        self._thread: threading.Thread | None = None
        self._store: dist.Store | None = None
        self._names = {module: name for name, module in names}

        def note(module: nn.Module, *_: Any) -> None:
            if self._is_on and torch.is_grad_enabled() and module not in self._called:
                self._called.add(module)
                self.note(self._names[module])

        hook = hidden_from_dynamo(note)  # graphs of functions that a user compiled would break at the checksum
        for module in self._names:
            undo.callback(module.register_forward_pre_hook(hook).remove)

    def begin(self, step: StepState, undo: ExitStack) -> None:
        """Called before a step; ``undo`` is closed when the step ends or fails."""
        self._called.clear()
        if step.is_training:
            number, now, _ = self._records
            self._records = number + 1, [], now
            self._is_on = True
            undo.callback(self._rest)

    def _rest(self) -> None:
        self._is_on = False

    def note(self, name: str) -> None:
        """Record that the current step runs ``name``."""
        self.checksum = crc32(name.encode(), self.checksum)
        self._records[1].append(name)

    # Ranks that wait for one another

    def open(self) -> None:
        """Start to watch; every rank must."""
        self._over = over = threading.Event()
        self._found, self._records = "", (0, [], [])
        self._store = shared_store(f"lightning_ups/stalls/{next(_numbers)}")
        self._thread = threading.Thread(target=self._watch, args=(over,), daemon=True, name="stalls")
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        if self._over is not None and self._thread is not None:
            self._over.set()
            self._thread.join(timeout=1)  # until then it holds the modules
        self._over = self._store = self._thread = None

    def explain(self, error: BaseException) -> None:
        """Add to an error of a collective that timed out why ranks wait for one another."""
        if self._over is not None and ("timed out" in str(error).lower() or "timeout" in str(error).lower()):
            error.add_note(self._found or f"If ranks ran different modules in a training step: {self._remedy}")

    def _watch(self, over: threading.Event) -> None:
        seen: Any = None
        while not over.wait(PATIENCE_S):
            number, now, before = self._records
            if not number or (number, len(now)) != seen:
                seen = number, len(now)
                continue
            store = self._store
            if store is None:
                return
            try:
                store.set(str(dist.get_rank()), json.dumps([number, now, before]))
                if dist.get_rank() == 0 and (found := self._compared(store)):
                    self._found = f"{found} {self._remedy}"
                    _logger.error(self._found)
                    return
            except (RuntimeError, ValueError):  # the run has ended, and its store is gone
                return

    def _compared(self, store: dist.Store) -> str | None:
        number, now, before = self._records
        for rank in range(1, dist.get_world_size()):
            if not store.check([str(rank)]):
                continue
            their_number, theirs, their_before = json.loads(store.get(str(rank)))
            ours, others = {number: now, number - 1: before}, {their_number: theirs, their_number - 1: their_before}
            for step in sorted(ours.keys() & others.keys()):
                for mine, other in zip(ours[step], others[step], strict=False):  # one may have run less
                    if mine != other:
                        return (
                            f"Ranks wait for one another: in the same training step rank 0 has run {mine}, and rank"
                            f" {rank} {other}."
                        )
        return None
