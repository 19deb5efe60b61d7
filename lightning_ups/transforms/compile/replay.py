"""Replaying CUDA graphs of a model's one root where its first training step shows that they pay, and never otherwise.

Nobody has asked for CUDA graphs here, so nothing may come of them but speed. Hence a recording is made of what is
compiled anyway, and takes only the call that it was made for: in training, with gradients, of the very sizes that were
measured, and when the backward of the last has been, or can no longer come. All other calls, such as those of an
evaluation or of the last batch, run as without it. What the model returns is copied out of the recording's memory, and
gradients are moved out; who keeps something else makes torch record anew, since that memory is written to again only
when no tensor lies there. After a few such recordings, a failure, or a second compilation, it is given up.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from lightning_ups._compat.torch.compile import dynamo
from lightning_ups.transforms.compile.cuda_graphs import Forward as GraphForward
from lightning_ups.transforms.compile.cuda_graphs import begin_step
from lightning_ups.transforms.compile.frame import Frame, calling
from lightning_ups.transforms.compile.mode import Choice, Clock, Pace, Timing, choose, is_open, measure
from lightning_ups.transforms.compile.trial import GraphError, Rehearsal, State
from lightning_ups.transforms.quoted import first_line

__all__ = ["Call", "Replay", "call_of"]

MOST_RECORDINGS = 8  # beyond those of the first call
MOST_WAITS = 20


class Call(NamedTuple):
    """What tells the calls of a model apart."""

    block: str
    training: bool
    inputs: tuple[Hashable, ...]

    @property
    def unknown(self) -> str | None:
        """The class of an input that does not say what is in it, or None."""
        return next((kind.name for kind in self.inputs if isinstance(kind, _Unknown)), None)


class _Unknown(NamedTuple):
    name: str


_PLAIN = (bool, int, float, str, Enum, torch.dtype, torch.device, type(None))


def call_of(block: str, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    """Return what tells a call of the ``module`` named ``block`` from others: sizes, types and plain values."""
    return Call(block, module.training, tuple(_kinds((args, kwargs))))


def _kinds(value: Any) -> Iterator[Hashable]:
    if isinstance(value, Tensor):
        yield value.shape, value.stride(), value.dtype, value.device, value.requires_grad
    elif isinstance(value, (list, tuple)):
        yield type(value), len(value)
        for item in value:
            yield from _kinds(item)
    elif isinstance(value, Mapping):
        yield type(value), (*value,)
        for item in value.values():
            yield from _kinds(item)
    elif is_dataclass(value) and not isinstance(value, type):
        yield type(value)
        for field in fields(value):
            yield from _kinds(getattr(value, field.name))
    else:
        yield value if isinstance(value, _PLAIN) else _Unknown(type(value).__name__)


class Replay:
    """The choice between a model as it is compiled and CUDA graphs of it, and the graphs.

    Args:
        clock: The times of the host and of the device.
        recordings: Returns how many CUDA graphs are recorded by now.
        tell: Called with what the user should know.
    """

    def __init__(self, clock: Clock, *, recordings: Callable[[], int], tell: Callable[[str], None]) -> None:
        self._clock, self._recordings, self._tell = clock, recordings, tell
        self.choice: Choice | None = None
        self._now: Call | None = None  # of the model, that runs
        self._chosen: Call | None = None
        self._step: list[Call] = []  # for each graph that has run in this step
        self._timings: dict[Call, Timing | str] = {}
        self._pace: Pace | None = None
        self._frame: Frame | None = None
        self._graph: object = None  # the one that is recorded
        self._recorded = 0  # for this model in this run, with the first call
        self._recorded_by_then = 0  # for whatever the device ran
        self._ran = self._tried = False
        self._last: Callable[[], GraphForward | None] = lambda: None
        self._waited = 0  # steps that could not be replayed for a backward that may still come
        self.gradients = False  # may lie in memory of a recording

    @property
    def active(self) -> bool:
        """Whether CUDA graphs are chosen, and not given up."""
        return self.choice is not None and self.choice.graphs

    @property
    def idle(self) -> bool:
        """Whether CUDA graphs are not chosen, or given up."""
        return self.choice is not None and not self.choice.graphs

    @property
    def is_over(self) -> bool:
        """Whether CUDA graphs have no part in steps to come."""
        return self.idle and not self.gradients

    @property
    def facts(self) -> dict[str, Any]:
        """What was chosen and came of it, as values that JSON knows."""
        made = {} if self._frame is None else {"recorded": self._recorded}
        return {} if self.choice is None else {**self.choice.facts, **made}

    def begin_step(self) -> None:
        """Called when a training step begins."""
        self._keep_pace()
        self._step.clear()
        self.gradients = self.gradients and self.active

    # The first step: what runs in it, and how long that takes.

    def watch(self, call: Call | None) -> None:
        """Record that the model runs ``call`` now, or None for a call without gradients."""
        self._now = call

    def ran_graph(self) -> None:
        """Record that a graph runs in this call."""
        if self.choice is None and self._now is not None:
            self._step.append(self._now)

    def wants_timing(self) -> bool:
        """Return whether this call of the model is still to be measured."""
        return self.choice is None and self._now is not None and self._now not in self._timings

    def time(self, rehearsal: Rehearsal) -> None:
        """Measure what runs in this call."""
        assert self._now is not None
        self._timings[self._now] = measure(rehearsal, self._clock)

    def untimed(self, reason: str) -> None:
        """Record why this call cannot be measured."""
        if self._now is not None:
            self._timings[self._now] = reason

    def decide(self) -> None:
        """Choose by what ran in the step that ends, if that was anything and the choice is not made."""
        if self.choice is not None or self._pace is not None or not self._step:
            return
        choice = self._choose()
        if choice.timing is not None and is_open(choice.timing):
            self._pace = Pace(self._clock)
        else:
            self._settle(choice)

    def _keep_pace(self) -> None:
        if self._pace is None or self.choice is not None or self._chosen is None:
            return
        if (step_ms := self._pace.begin_step()) is not None:
            timing = self._timings[self._chosen]
            assert isinstance(timing, Timing)
            self._settle(choose(replace(timing, step_ms=step_ms)))

    def _settle(self, choice: Choice) -> None:
        self.choice = choice
        if self.active:
            # From now on the generation, as torch calls it, stays the same: what is alive is not written to again.
            begin_step()

    def _choose(self) -> Choice:
        if len(self._step) != 1:
            return Choice(
                graphs=False, why=f"{len(self._step)} graphs run in a step, and CUDA graphs are chosen for one"
            )
        (self._chosen,) = self._step
        if (unknown := self._chosen.unknown) is not None:
            return Choice(
                graphs=False, why=f"the model is called with a {unknown}, which does not say what sizes it has"
            )
        timing = self._timings.get(self._chosen, "it had run before")
        if isinstance(timing, str):
            return Choice(graphs=False, why=f"the model could not be measured: {timing}")
        return choose(timing)

    # Afterwards: the graphs.

    def leaves(self, call: Call) -> bool:
        """Return whether ``call`` is to run in another frame than the graph that is replayed.

        In the same frame, Dynamo would compile for sizes that vary, and use that graph from then on for all sizes.
        """
        return self.active and self._chosen is not None and call.block == self._chosen.block and call != self._chosen

    def takes(self, call: Call) -> bool:
        """Return whether ``call`` is to be replayed now."""
        if not self.active or call != self._chosen:
            return False
        if (last := self._last()) is not None and not last.over:
            self._waited += 1
            return False
        return True

    def run(self, frame: Frame, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[bool, Any]:
        """Return whether the graph has run, and what it returned; if it has not, it is given up."""
        assert self._chosen is not None
        self._frame, start, self._ran = frame, dynamo.mark(), False
        kept, variants = None if self._tried else State(module), len(frame.askers)
        recorded_before = 0 if self._tried else self._recordings()
        try:
            with calling(self):
                outputs = frame.run(module, *args, **kwargs)
        except Exception as error:
            if kept is None or not (_is_ours(error) or dynamo.is_compiler_error(error, start)):
                raise
            kept.put_back()
            self.give_up(first_line(error))
            return False, None
        self.gradients, self._waited = True, 0
        if dynamo.compiled_since(start):
            kind = (torch.is_inference_mode_enabled(), module.training)
            frame.learn(start, asker=self._chosen.block, kind=kind)
        if self._tried and len(frame.askers) > variants:
            guard = frame.recompiles[-1] if frame.recompiles else "unknown"
            self.give_up(f"the model was compiled again, since this did not hold: {guard}")
        elif self._ran and not self._tried:
            self._prove(frame, recorded_before)
        return True, outputs

    def _prove(self, frame: Frame, recorded_before: int) -> None:
        self._tried, self._recorded_by_then = True, self._recordings()
        self._recorded = self._recorded_by_then - recorded_before
        frame.recordings += self._recorded  # one of an earlier run holds as long as weights and buffers lie there
        if frame.no_cuda_graphs or not frame.recordings:
            why = frame.no_cuda_graphs[-1] if frame.no_cuda_graphs else "nothing of the model can be recorded"
            self.give_up(f"inductor records none: {why}")

    def check(self) -> None:
        """Give up if the graphs are recorded over and over; call it after each step."""
        if self.active and self._tried and self._recordings() - self._recorded_by_then > MOST_RECORDINGS:
            self.give_up(
                "they are recorded anew in one step after another, since something keeps what a graph returned, or"
                " brings weights and buffers to other memory"
            )
        elif self.active and self._waited > MOST_WAITS:
            self.give_up("something keeps what the model returned in a step that had no backward, which may still come")

    def give_up(self, reason: str) -> None:
        """Go on without CUDA graphs."""
        assert self.choice is not None
        self.choice = replace(self.choice, graphs=False, why=f"CUDA graphs were given up: {reason}")
        self._tell(
            f"Compile gives up CUDA graphs, which mode='auto' had chosen: {reason}."
            " The run goes on as with mode='default', which is slower where launching takes most of a step."
            " Set mode='default' to do without from the start."
        )

    # What trial.Caller asks for, on behalf of the recording.

    is_settled = False

    @property
    def records(self) -> bool:
        """True."""
        return True

    def records_graph(self, graph: object) -> bool:
        """Return True for the first graph that asks, which is then the one."""
        if not self._tried:
            self._graph = graph
        return graph is self._graph

    def made_graph(self, *, from_cache: bool) -> None:
        """Count it."""
        assert self._frame is not None
        self._frame.graphs += 1
        self._frame.cache_hits += from_cache

    def left_small_graph(self) -> None:
        """Count it, though it is not recorded."""
        self.made_graph(from_cache=False)

    def wants_trial(self) -> bool:
        """Return whether nothing has been recorded in this run."""
        return not self._tried

    def wants_again(self) -> bool:
        """Return the same for a graph that an earlier run has recorded, with weights that lay elsewhere."""
        return not self._tried and not self._ran

    def tried(self, rehearsal: Rehearsal) -> None:
        """Record it and replay it, since the first time has only warmed up."""
        for _ in range(2):
            rehearsal.backward(rehearsal.forward())

    def not_tried(self, reason: str) -> None:
        """Do without what cannot be tried."""
        raise GraphError(reason)

    def may_save(self, written: Tensor) -> bool:
        """Return True: a trial without CUDA graphs came before."""
        return True

    def runs_graph(self) -> None:
        """Record that the graph runs in this call."""
        self._ran = True

    def ran_forward(self, forward: GraphForward) -> None:
        """Wait for its backward, as long as that may come."""
        self._last = ref(forward)


def _is_ours(error: Exception) -> bool:
    return isinstance(error, (GraphError, torch.OutOfMemoryError))
