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
    marks = _marks()
    ours = marks is None or marks.mark_step_counter == 0  # it counts down from 0, which stands for no mark
    if ours and marks is not None:
        marks.mark_step_counter = _LAST_MARK  # no two steps of a process have one mark
    try:
        yield
    finally:
        if ours and (marks := _marks()) is not None:
            _LAST_MARK = min(_LAST_MARK, marks.mark_step_counter)
            marks.mark_step_counter = 0


def _marks() -> Any:
    trees = sys.modules.get(_TREES)
    return None if trees is None else trees.MarkStepBox


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
