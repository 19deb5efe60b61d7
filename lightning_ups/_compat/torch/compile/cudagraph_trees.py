"""Inductor's recordings of CUDA graphs, which torch keeps as trees and does not count."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_ups._compat.patches import applied, why_not

__all__ = ["Demand", "marked_steps", "recorded_on_demand", "recordings", "why_not_on_demand"]

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
    ours = marks is None or marks.mark_step_counter == 0  # it counts down from 0, which means no mark
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


class Demand:
    """When a compiled graph is recorded and replayed as a CUDA graph: in some calls, and else it runs as compiled.

    Args:
        wanted: Asked in each forward.
    """

    def __init__(self, wanted: Callable[[], bool]) -> None:
        self._wanted = wanted
        self._parts = 0  # of the backward, that can be recorded
        self._parts_to_come = 0

    def begin_backward(self) -> None:
        """Replay the backward that comes next, that of a forward that was replayed."""
        self._parts_to_come = self._parts

    def add(self, *, is_backward: bool) -> Callable[[], bool]:
        """Count a part of the graph that can be recorded, and return whether to replay it, to be asked in each call."""
        self._parts += is_backward
        return self._replays_backward if is_backward else self._replays_forward

    def _replays_forward(self) -> bool:
        return self._parts > 0 and self._wanted()

    def _replays_backward(self) -> bool:
        self._parts_to_come -= 1
        return self._parts_to_come >= 0


_CUDAGRAPHIFY = "torch._inductor.compile_fx:cudagraphify"
_NOTICE = "torch._inductor.output_code:maybe_handle_backward_generation"


def why_not_on_demand() -> str | None:
    """Return why this torch does not allow `recorded_on_demand`, or None."""
    return why_not(_CUDAGRAPHIFY) or why_not(_NOTICE)


@contextmanager
def recorded_on_demand(demand: Demand) -> Iterator[None]:
    """Let inductor, which compiles for CUDA graphs in this context, record and replay them on ``demand`` alone.

    So one compilation serves both. Inductor would record in each call.
    """

    def on_demand(make: Callable[..., Any]) -> Callable[..., Any]:
        def cudagraphify(model: Callable[..., Any], static_input_idxs: Sequence[int] = (), **options: Any) -> Any:
            recorded = make(model, static_input_idxs, **options)  # which records when it is first called
            launched = _aligned(model, static_input_idxs, options.get("mutated_input_idxs", ()))
            replays = demand.add(is_backward=options["is_backward"])

            def run(inputs: list[Any]) -> Any:
                return recorded(inputs) if replays() else launched(inputs)

            run._boxed_call = True  # type: ignore[attr-defined]
            return run

        return cudagraphify

    with (
        applied(_CUDAGRAPHIFY, on_demand),
        # It expects that the forward is recorded when the backward is compiled. Here neither is without the other.
        applied(_NOTICE, lambda _: lambda *_, **__: None),
    ):
        yield


def _aligned(model: Callable[..., Any], static: Sequence[int], mutated: Sequence[int]) -> Callable[..., Any]:
    """Return ``model`` with inputs copied that are not aligned, which inductor leaves to CUDA graphs."""
    from torch._inductor.utils import align_inputs_from_check_idxs
    from torch.utils._ordered_set import OrderedSet

    aligned: Callable[..., Any] | None = None

    def run(inputs: list[Any]) -> Any:
        nonlocal aligned
        if aligned is None:
            check = [index for index, value in enumerate(inputs) if isinstance(value, Tensor) and index not in static]
            aligned = align_inputs_from_check_idxs(model, check, OrderedSet(mutated))
        return aligned(inputs)

    return run
