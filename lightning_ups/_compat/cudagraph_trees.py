"""Inductor's recordings of CUDA graphs, which torch keeps as trees and does not count."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["marked_steps", "recordings"]

_TREES = "torch._inductor.cudagraph_trees"  # imported by the first recording, and by the first step that is marked
_LAST_MARK = 0


@contextmanager
def marked_steps() -> Iterator[None]:
    """Leave it to torch again, when the context closes, to tell where a step begins.

    Once a step was marked, by ``torch.compiler.cudagraph_mark_step_begin``, torch waits for the next mark for as long
    as the process lives: whatever replays CUDA graphs later and marks none would be recorded anew in each call. Where
    steps were marked before, they go on being marked.
    """
    global _LAST_MARK
    before = _last_mark()
    if before == 0 and _LAST_MARK != 0:
        sys.modules[_TREES].MarkStepBox.mark_step_counter = _LAST_MARK  # no two steps of a process have one mark
    try:
        yield
    finally:
        if before == 0 and (mark := _last_mark()) != 0:
            _LAST_MARK = mark
            sys.modules[_TREES].MarkStepBox.mark_step_counter = 0


def _last_mark() -> int:
    # It counts down from 0, which stands for no mark.
    return trees.MarkStepBox.mark_step_counter if (trees := sys.modules.get(_TREES)) is not None else 0


def recordings(device: torch.device) -> int:
    """Return how many CUDA graphs inductor has recorded for ``device`` and keeps."""
    trees = sys.modules.get(_TREES)
    if trees is None or device.type != "cuda":
        return 0
    index = torch.cuda.current_device() if device.index is None else device.index
    manager = trees.get_manager(index, create_if_none_exists=False)
    return 0 if manager is None or manager.roots is None else _count(manager.roots)


def _count(by_function: dict[Any, list[Any]]) -> int:
    nodes = [node for recorded in by_function.values() for node in recorded]
    return len(nodes) + sum(_count(node.children) for node in nodes)
