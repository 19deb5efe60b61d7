"""Replaying CUDA graphs of what a model runs in a step where its first training step shows that they pay.

Nobody has asked for CUDA graphs here, so nothing may come of them but speed. Hence a recording is made of what is
compiled anyway, and takes only the calls that it was made for: in training, with gradients, of the very sizes that were
measured, and when the backward of the last has been, or can no longer come. All other calls, such as those of an
evaluation or of the last batch, run as without it. Each recording has memory of its own, so that calls whose backwards
come later do not meet. What the model returns is copied out of that memory, and gradients are moved out. If something
else there is kept, torch does not write over it and records anew.
After a few such recordings or a failure, CUDA graphs are given up; after another compilation, they are chosen anew.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from lightning_ups._compat.torch.compile import dynamo
from lightning_ups._compat.torch.compile.cudagraph_trees import Demand
from lightning_ups.transforms.compile.cuda_graphs import Slot, begin_step
from lightning_ups.transforms.compile.frame import Frame, calling
from lightning_ups.transforms.compile.mode import Choice, Clock, Pace, Timing, choose, is_open, measure, together, unfit
from lightning_ups.transforms.compile.trial import GraphError, Rehearsal, State
from lightning_ups.transforms.quoted import first_line

MOST_GRAPHS = 48  # in a step: the memory of each recording is rounded up to some MiB
MOST_RECORDINGS = 8  # beyond those of the first call
MOST_WAITS = 20
MOST_CHOICES = 3  # after each of which the model was compiled again
_KEPT: list[Slot] = []  # of runs that have ended, while somebody keeps a tensor in their memory


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
    return Call(block, module.training, tuple(_kinds((args, kwargs), ())))


def _kinds(value: Any, around: tuple[int, ...]) -> Iterator[Hashable]:
    if id(value) in around:  # as in a list that holds itself
        yield _Unknown(type(value).__name__)
        return
    around = (*around, id(value))
    if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested:
        yield value.shape, value.stride(), value.dtype, value.device, value.requires_grad
    elif isinstance(value, (list, tuple)):
        yield type(value), len(value)
        for item in value:
            yield from _kinds(item, around)
    elif isinstance(value, Mapping):
        yield type(value), (*value,)
        for item in value.values():
            yield from _kinds(item, around)
    elif is_dataclass(value) and not isinstance(value, type):
        yield type(value)
        for field in fields(value):
            yield from _kinds(getattr(value, field.name, None), around)
    else:
        yield value if isinstance(value, _PLAIN) else _Unknown(type(value).__name__)


class _Key(NamedTuple):
    """A graph that runs in a call; after a graph break there are several."""

    call: Call
    graph: fx.GraphModule


class Replay:
    """The choice between a model as it is compiled and CUDA graphs of it, and the graphs.

    Args:
        clock: The times of the host and of the device.
        tell: Called with what the user should know.
    """

    def __init__(self, clock: Clock, *, tell: Callable[[str], None]) -> None:
        self.clock, self._tell = clock, tell
        self.choice: Choice | None = None
        self.gradients = False  # may lie in memory of a recording
        self.paused = False  # nothing is replayed for now
        self._now: Call | None = None  # of the model, that runs
        # The first step.
        self._step: list[_Key] = []  # for each graph that has run in this step
        self._timings: dict[_Key, Timing | str] = {}
        self._total: Timing | None = None  # of what may be replayed in a step
        self._pace: Pace | None = None
        # Afterwards.
        self._chosen: Counter[_Key] = Counter()  # how often they run in a step
        self._slots: dict[_Key, list[Slot]] = {}
        self._retired: list[Slot] = []  # whose memory is freed when nothing is in it
        self._frame: Frame | None = None
        self.slot: Slot | None = None  # that is in use
        self._tries = False  # in the present call
        self._may_try = False  # since what the module holds can be put back
        self._proven: set[Call] = set()
        self._short: set[Call] = set()  # of another slot
        self._waits: Counter[_Key] = Counter()  # calls in a row that found no slot free
        self._choices = self._steps = 1
        self._recorded = 0

    @property
    def active(self) -> bool:
        """Whether CUDA graphs are chosen, and not given up."""
        return self.choice is not None and self.choice.graphs

    @property
    def idle(self) -> bool:
        """Whether CUDA graphs are not chosen, or given up."""
        return self.choice is not None and not self.choice.graphs

    @property
    def is_undecided(self) -> bool:
        """Whether CUDA graphs may still be chosen: not if no graph has run in some steps."""
        return self.choice is None and (self._pace is not None or bool(self._timings) or self._steps < MOST_WAITS)

    @property
    def is_over(self) -> bool:
        """Whether CUDA graphs have no part in steps to come."""
        return self.idle and not self.gradients and not self._retired

    @property
    def has_recorded(self) -> bool:
        """Whether anything has been recorded since the choice was made."""
        return any(slot.recorded for slot in chain.from_iterable(self._slots.values()))

    @property
    def facts(self) -> dict[str, Any]:
        """What was chosen and came of it, as values that JSON knows."""
        made = {} if self._frame is None else {"recorded": self._recorded}
        return {} if self.choice is None else {**self.choice.facts, **made}

    def begin_step(self) -> None:
        """Called when a training step begins."""
        self._steps += 1
        self._keep_pace()
        self._step.clear()
        self.gradients = self.gradients and self.active

    # The first step: what runs in it, and how long that takes.

    def watch(self, call: Call | None) -> None:
        """Record that the model runs ``call`` now, or None for a call without gradients."""
        self._now = call

    def ran_graph(self, graph: fx.GraphModule) -> None:
        """Record that ``graph`` runs in this call."""
        if self.choice is None and self._now is not None:
            self._step.append(_Key(self._now, graph))

    def wants_timing(self, graph: fx.GraphModule) -> bool:
        """Return whether ``graph`` is still to be measured in this call."""
        if self.choice is not None or self._pace is not None or self._now is None:
            return False
        return _Key(self._now, graph) not in self._timings

    def time(self, graph: fx.GraphModule, rehearsal: Rehearsal) -> None:
        """Measure ``graph`` in this call."""
        assert self._now is not None
        self._timings[_Key(self._now, graph)] = measure(rehearsal, self.clock)

    def untimed(self, graph: fx.GraphModule, reason: str) -> None:
        """Record why ``graph`` cannot be measured in this call."""
        if self._now is not None:
            self._timings[_Key(self._now, graph)] = reason

    def decide(self) -> None:
        """Choose by what ran in the step that ends, if that was anything and the choice is not made."""
        if self.choice is not None or self._pace is not None or not self._step:
            return
        choice = self._choose()
        if choice.timing is not None and is_open(choice.timing):
            self._pace = Pace(self.clock)
        else:
            self._settle(choice)

    def _keep_pace(self) -> None:
        if self._pace is None or self.choice is not None or self._total is None:
            return
        if (step_ms := self._pace.begin_step()) is not None:
            self._settle(choose(replace(self._total, step_ms=step_ms)))

    def _settle(self, choice: Choice) -> None:
        self.choice = choice
        if self.active:
            # From now on the generation, as torch calls it, stays the same: what is alive is not written to again.
            begin_step()

    def _choose(self) -> Choice:
        if len(self._step) > MOST_GRAPHS:
            return Choice(
                graphs=False,
                why=f"{len(self._step)} graphs run in a step, and CUDA graphs are chosen for at most {MOST_GRAPHS}",
            )
        found, whys = list[Timing](), list[str]()
        for key, count in Counter(self._step).items():
            timing = self._timings.get(key, "it had run before")
            if (unknown := key.call.unknown) is not None:
                whys.append(f"the model is called with a {unknown}, which does not say what sizes it has")
            elif isinstance(timing, str):
                whys.append(f"the model could not be measured: {timing}")
            elif (why := unfit(timing)) is not None:
                whys.append(why)
            else:
                self._chosen[key] = count
                found += [timing] * count
        if not found:
            return Choice(graphs=False, why=whys[0])
        self._total = together(found)
        return choose(self._total)

    # Afterwards: the graphs.

    def leaves(self, call: Call) -> bool:
        """Return whether ``call`` is to run in another frame than the graph that is replayed.

        In the same frame, Dynamo would compile for sizes that vary, and use that graph from then on for all sizes.
        """
        others = self.active and not self._is_chosen(call)
        return others and any(key.call.block == call.block for key in self._chosen)

    def takes(self, call: Call) -> bool:
        """Return whether graphs of ``call`` are to be replayed."""
        return self.active and not self.paused and self._is_chosen(call)

    def _is_chosen(self, call: Call) -> bool:
        return any(key.call == call for key in self._chosen)

    def run(self, call: Call, frame: Frame, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[bool, Any]:
        """Return whether ``call`` has run, and what it returned; if it has not, CUDA graphs are given up."""
        self._now, self._frame, self.slot, self._tries = call, frame, None, False
        self._may_try = call not in self._proven or call in self._short
        kept = State(module) if self._may_try else None
        start, variants, failure, outputs = dynamo.mark(), len(frame.askers), None, None
        try:
            with calling(self):
                outputs = frame.run(module, *args, **kwargs)
        except Exception as error:
            if not dynamo.is_compiler_error(error, start) and (kept is None or not _is_ours(error)):
                raise
            failure = first_line(error)
        if failure is not None:
            if kept is not None:
                kept.put_back()
            self.give_up(failure)
            return False, None
        self.gradients = True
        if dynamo.compiled_since(start):
            frame.learn(start, asker=call.block, kind=(torch.is_inference_mode_enabled(), module.training))
        if len(frame.askers) > variants:
            guard = frame.recompiles[-1] if frame.recompiles else "unknown"
            self.choose_anew(f"the model was compiled again, since this did not hold: {guard}")
        elif self._tries:
            self._prove(frame)
        else:
            self._proven.add(call)
        return True, outputs

    def choose_anew(self, reason: str) -> None:
        """Forget the choice, as after an unfreeze, unless that has happened too often."""
        if self._choices >= MOST_CHOICES:
            self.give_up(reason)
            return
        self._choices += 1
        self._retire()
        self.choice = self._pace = self._total = None
        self._timings.clear()

    def _prove(self, frame: Frame) -> None:
        """See what has been recorded of the graphs that ran for the first time in this call."""
        for key, slots in [*self._slots.items()]:
            for slot in slots:
                if slot.tried and not slot.recorded:
                    slot.recorded = slot.recording.count
                    self._recorded += slot.recorded
            if any(slot.tried and not slot.recorded for slot in slots):
                self._retired += self._slots.pop(key)
                del self._chosen[key]
        if not self._chosen:
            why = frame.no_cuda_graphs[-1] if frame.no_cuda_graphs else "nothing of the model can be recorded"
            self.give_up(f"inductor records none: {why}")

    def check(self) -> None:
        """Give up if the graphs are recorded over and over; call it after each step."""
        if not self.active:
            return
        slots = chain.from_iterable(self._slots.values())
        if any(slot.recorded and slot.recording.count > slot.recorded + MOST_RECORDINGS for slot in slots):
            self.give_up(
                "they are recorded anew in one step after another, since something keeps what a graph returned, or"
                " brings weights and buffers to other memory"
            )
        elif max(self._waits.values(), default=0) > MOST_WAITS:
            self.give_up("something keeps what the model returned in a step that had no backward, which may still come")

    def _retire(self) -> None:
        for slot in chain.from_iterable(self._slots.values()):
            slot.retire()
            self._retired.append(slot)
        for known in (self._slots, self._waits, self._proven, self._short, self._chosen):
            known.clear()

    def free(self) -> None:
        """Free memory of recordings that are not used any more; call it after gradients were moved out."""
        unused = [slot for slot in (*self._retired, *_KEPT) if slot.is_unused]
        if not unused:
            return
        self.clock.wait()  # a copy of gradients may still read there, and memory may go without waiting for that
        for slot in unused:
            (self._retired if slot in self._retired else _KEPT).remove(slot)
            slot.close()
        self.clock.release()  # else no other tensor could use it

    def end(self) -> None:
        """Free the memory of all recordings. What somebody still uses is freed when another run ends."""
        self._retire()
        self.free()
        _KEPT.extend(self._retired)
        self._retired.clear()

    def leave(self, reason: str) -> None:
        """Go on without CUDA graphs, as the better choice."""
        assert self.choice is not None
        self._retire()
        self.choice = replace(self.choice, graphs=False, why=reason)

    def give_up(self, reason: str) -> None:
        """Go on without CUDA graphs, and say so."""
        self.leave(f"CUDA graphs were given up: {reason}")
        self._tell(
            f"Compile gives up CUDA graphs, which mode='auto' had chosen: {reason}."
            " The run goes on as with mode='default', which is slower where launching takes most of a step."
            " Set mode='default' to do without from the start."
        )

    # What trial.Caller asks for, on behalf of the recording.

    is_settled = False

    def takes_slot(self, graph: fx.GraphModule, demand: Demand) -> bool:
        """Take a slot that is free, or a new one if the graph has fewer than it runs in a step."""
        assert self._now is not None
        key = _Key(self._now, graph)
        self.slot = None
        if self._chosen[key]:
            slots = self._slots.setdefault(key, [])
            self.slot = next((slot for slot in slots if slot.is_free), None)
            if self.slot is None and len(slots) < self._chosen[key]:
                if self._may_try:
                    self.slot = Slot(demand)
                    slots.append(self.slot)
                    self._short.discard(self._now)
                else:
                    self._short.add(self._now)
            self._waits[key] = 0 if self.slot is not None else self._waits[key] + 1
        return self.slot is not None

    def made_graph(self, *, from_cache: bool) -> None:
        """Count it."""
        assert self._frame is not None
        self._frame.graphs += 1
        self._frame.cache_hits += from_cache

    def left_small_graph(self) -> None:
        """Count it, though it is not recorded."""
        self.made_graph(from_cache=False)

    def wants_trial(self) -> bool:
        """Return whether nothing has been recorded in the slot that is in use."""
        return self.slot is not None and not self.slot.tried

    def wants_again(self, graph: fx.GraphModule) -> bool:
        """Return the same for a graph that has run in another slot."""
        return self.wants_trial()

    def tried(self, graph: fx.GraphModule, rehearsal: Rehearsal) -> None:
        """Record it and replay it, since the first time has only warmed up."""
        assert self.slot is not None
        for _ in range(2):
            rehearsal.backward(rehearsal.forward())
        self.slot.tried = self._tries = True

    def not_tried(self, graph: fx.GraphModule, reason: str) -> None:
        """Do without what cannot be tried."""
        raise GraphError(reason)

    def may_save(self, written: Tensor) -> bool:
        """Return True: a trial without CUDA graphs came before."""
        return True

    def runs_graph(self, graph: fx.GraphModule) -> None:
        """Leave it."""


def _is_ours(error: Exception) -> bool:
    return isinstance(error, (GraphError, torch.OutOfMemoryError))
