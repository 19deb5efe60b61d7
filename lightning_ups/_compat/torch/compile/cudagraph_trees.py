"""Inductor's CUDA graph recordings, which torch keeps as trees without counting them."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import local
from typing import Any

from torch import Tensor

from lightning_ups._compat.patches import applied

_TREES = "torch._inductor.cudagraph_trees"  # imported by the first recording, and by the first step that is marked
_LAST_MARK = 0


@contextmanager
def marked_steps() -> Iterator[None]:
    """Let torch detect the beginning of a step again when the context closes.

    Once a step was marked by ``torch.compiler.cudagraph_mark_step_begin``, torch waits for marks for the rest of the
    process: CUDA graphs replayed later without marks would be recorded again in each call. If steps were marked before
    the context, marking stays on.
    """
    global _LAST_MARK
    marks = _marks()
    ours = marks is None or marks.mark_step_counter == 0  # it counts down from 0, which means no mark
    if ours and marks is not None:
        marks.mark_step_counter = _LAST_MARK  # marks are unique within a process
    try:
        yield
    finally:
        if ours and (marks := _marks()) is not None:
            _LAST_MARK = min(_LAST_MARK, marks.mark_step_counter)
            marks.mark_step_counter = 0


def _marks() -> Any:
    trees = sys.modules.get(_TREES)
    return None if trees is None else trees.MarkStepBox


def _count(by_function: dict[Any, list[Any]]) -> int:
    nodes = [node for recorded in by_function.values() for node in recorded]
    return len(nodes) + sum(_count(node.children) for node in nodes)


class Recording:
    """A CUDA graph of a forward, and one of its backward, in memory that no other recording writes to.

    Torch has one memory pool for all recordings of a device, and does not know that autograd keeps what a replayed
    forward has saved: another forward, before the backward of the first, may overwrite it.
    """

    def __init__(self) -> None:
        self.parts: dict[object, Callable[..., Any]] = {}  # inductor may record a forward or a backward in several
        self._container: Any = None
        self._addresses: set[int] = set()  # of the graphs' outputs, except inputs
        self._nodes: set[Any] = set()  # of the tree, whose outputs these are
        self._settled: set[object] = set()  # parts that were replayed
        self._anew: Any = None  # the node of a part that was recorded again

    @property
    def count(self) -> int:
        """The number of recorded graphs. It grows if one cannot be replayed."""
        manager = None if self._container is None else self._container.tree_manager
        return 0 if manager is None or manager.roots is None else _count(manager.roots)

    @property
    def is_kept(self) -> bool:
        """Whether a tensor in its memory is still in use."""
        manager = None if self._container is None else self._container.tree_manager
        return manager is not None and bool(manager.live_cudagraph_pool_storages_in_curr_execution())

    def holds(self, values: Iterable[Any]) -> bool:
        """Return whether one of ``values`` is in the memory of the recording."""
        known = self._addresses
        return any(isinstance(value, Tensor) and value.data_ptr() in known for value in values)

    def run(self, part: object, make: Callable[[], Callable[..., Any]], inputs: list[Any], *, device: int) -> Any:
        """Return the outputs of ``part``: the first call only warms up, the second is recorded.

        Args:
            part: A key for this part.
            make: Returns inductor's function for it.
            inputs: Its inputs; the list is emptied.
            device: The index of its device.
        """
        import torch._inductor.cudagraph_trees as trees

        if part not in self.parts:
            self.parts[part] = make()
        if self._container is None:
            self._container = trees.TreeManagerContainer(device)
        is_settled = part in self._settled
        given = set[int]() if is_settled else _addresses(inputs)
        containers = trees.get_obj(trees.local, "tree_manager_containers")
        of_others, before = containers.get(device), self._node
        containers[device] = self._container
        try:
            outputs = self.parts[part](inputs)
        finally:
            if of_others is None:
                del containers[device]
            else:
                containers[device] = of_others
        node = self._node
        if node in self._nodes:
            self._settled.add(part)
        elif is_settled:  # recorded again: its addresses are unknown, so this backward is launched
            self._settled.remove(part)
            self._anew = node
        elif node is not None and (node is not before or node is self._anew):
            # Otherwise torch has launched it, and its outputs are in other memory.
            self._addresses |= _addresses(outputs) - given
            if hasattr(node, "children"):  # and not one that warms up
                self._nodes.add(node)
        return outputs

    @property
    def _node(self) -> Any:
        """The node of the tree that ran last."""
        manager = None if self._container is None else self._container.tree_manager
        return None if manager is None else manager.current_node

    def close(self) -> None:
        """Free its memory, which must not be used any more."""
        if self._container is not None and self._container.tree_manager is not None:
            self._container.tree_manager.shutdown()
        for known in (self.parts, self._addresses, self._nodes, self._settled):
            known.clear()
        self._container = self._anew = None


def _addresses(values: Any) -> set[int]:
    values = values if isinstance(values, (tuple, list)) else (values,)
    return {value.data_ptr() for value in values if isinstance(value, Tensor)} - {0}


class Demand:
    """Decides in which calls a compiled graph is replayed as a CUDA graph; otherwise it runs as compiled."""

    def __init__(self) -> None:
        self._recordings: list[Recording] = []
        self._in_use = local()  # per thread
        self._can_record = False  # a forward is only recorded if its backward can be

    @contextmanager
    def using(self, recording: Recording) -> Iterator[None]:
        """Replay ``recording`` for the forward in this context, and for its backward."""
        if recording not in self._recordings:
            self._recordings.append(recording)
        self._in_use.recording = recording
        try:
            yield
        finally:
            del self._in_use.recording

    def forget(self, recording: Recording) -> None:
        """Stop using ``recording``."""
        if recording in self._recordings:
            self._recordings.remove(recording)

    def on_demand(
        self, make: Callable[..., Any], model: Callable[..., Any], static: Sequence[int], options: dict[str, Any]
    ) -> Callable[..., Any]:
        """Return a function that replays ``model`` on demand, and otherwise runs it."""
        launched = _aligned(model, static, options.get("mutated_input_idxs", ()))
        is_backward, part, device = options["is_backward"], object(), options.get("device_index", 0)
        self._can_record |= is_backward or options.get("is_inference", False)

        def run(inputs: list[Any]) -> Any:
            recording = self._of_backward(inputs) if is_backward else self._of_forward()
            if recording is None:
                return launched(inputs)
            return recording.run(part, lambda: make(model, static, **options), inputs, device=device)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def _of_forward(self) -> Recording | None:
        return getattr(self._in_use, "recording", None) if self._can_record else None

    def _of_backward(self, inputs: Sequence[Any]) -> Recording | None:
        """Return the recording of the forward that has saved some of ``inputs``."""
        return next((recording for recording in self._recordings if recording.holds(inputs)), None)


_CUDAGRAPHIFY = "torch._inductor.compile_fx:cudagraphify"
_NOTICE = "torch._inductor.output_code:maybe_handle_backward_generation"


@contextmanager
def recorded_on_demand(demand: Demand) -> Iterator[None]:
    """Let inductor record and replay the CUDA graphs that it compiles in this context only on ``demand``.

    One compilation then serves both. Inductor itself would record in each call.
    """

    def on_demand(make: Callable[..., Any]) -> Callable[..., Any]:
        def cudagraphify(model: Callable[..., Any], static_input_idxs: Sequence[int] = (), **options: Any) -> Any:
            return demand.on_demand(make, model, static_input_idxs, options)

        return cudagraphify

    with (
        applied(_CUDAGRAPHIFY, on_demand),
        # It expects that the forward is recorded when the backward is compiled. Here both are recorded or neither.
        applied(_NOTICE, lambda _: lambda *_, **__: None),
    ):
        yield


def _aligned(model: Callable[..., Any], static: Sequence[int], mutated: Sequence[int]) -> Callable[..., Any]:
    """Return ``model`` with unaligned inputs copied, which inductor leaves to CUDA graphs."""
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
