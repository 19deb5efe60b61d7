"""The memory of a step on each of many devices: sharding, buckets, gathered blocks and offloading."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from lightning_ups.insight.memory.account import FIXED, Kind, Moment, Phase
from lightning_ups.insight.memory.step import Step

Sharding = Literal["full", "gradients", "none", "copies"]
_STATE: tuple[Kind, ...] = ("optimizer state", "master weights")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How parameters, gradients and optimizer state are distributed.

    Args:
        sharding: As in ``FSDP2Strategy``; ``"copies"``: the unsharded model on every device, as under DDP.
        shards: Devices over which parameters are sharded.
        devices: All devices.
        stored: Bytes of a parameter in the optimizer, unless ``sharding`` is ``"copies"``.
        computed: Bytes of a parameter in computation.
        gathered_float8: Bytes of a gathered weight of a float8 layer.
        reduced: Bytes of a gradient in reductions.
        state: Bytes of optimizer state for a parameter.
        stepping: Additional bytes for a parameter during the optimizer step.
        on_host: The share of each kind in host memory.
        chunk: Bytes of a chunk of optimizer state on the host, of which at most three are on the device during the
            optimizer step. 0: the host runs the step. None: the device does, at once.
        workspace: Bytes of libraries in the same pool.
        whole_graph: Whether one graph contains all-gathers and reductions: it gathers a block while the previous one
            runs, and the block with the peak is unknown.
    """

    sharding: Sharding = "copies"
    shards: int = 1
    devices: int = 1
    stored: float = 4
    computed: float = 2
    gathered_float8: float = 2
    reduced: float = 4
    state: float = 8
    stepping: float = 0
    on_host: Mapping[Kind, float] | None = None
    chunk: int | None = None
    workspace: int = 0
    whole_graph: bool = False


def peak_of(step: Step, layout: Layout) -> Moment:
    """Return the largest moment of ``step`` on one device under ``layout``."""
    moments = _copied(step, layout) if layout.sharding == "copies" else _sharded(step, layout)
    found = [_with_host(moment, layout) for moment in moments]
    on_host = step.on_host + max(moment.on_host for moment in found)
    return replace(max(found, key=lambda moment: moment.total), on_host=on_host)


def _with_host(moment: Moment, layout: Layout) -> Moment:
    shares = layout.on_host or {}
    held = {key: round(size * (1 - shares.get(key[0], 0))) for key, size in moment.held.items()}
    moved = {key: moment.held[key] - size for key, size in held.items()}
    away = sum(size for (kind, _), size in moved.items() if kind in _STATE)
    if layout.chunk is not None and moment.phase == "optimizer":
        held = {key: size for key, size in held.items() if key[0] != "temporaries"}
    held["workspaces", ""] = held.get(("workspaces", ""), 0) + layout.workspace
    held["temporaries", "host"] = 3 * min(layout.chunk or 0, away)
    return replace(moment, held={key: size for key, size in held.items() if size}, on_host=sum(moved.values()))


def _copied(step: Step, layout: Layout) -> Iterator[Moment]:
    # DDP has a second copy of the gradients, in its buckets.
    buckets = round(layout.computed * sum(step.trained.values())) if layout.devices > 1 else 0
    for moment in step.peaks.values():
        yield replace(moment, held={**moment.held, ("gather buffers", "buckets"): buckets})


def _sharded(step: Step, layout: Layout) -> Iterator[Moment]:
    for (phase, place), moment in step.loose.items():
        loose = {key: size for key, size in moment.held.items() if key[0] not in FIXED}
        # Lightning frees the gradients of the previous step after the forward pass.
        reduced = sum(step.trained.values()) if phase == "forward" else _reduced(step, moment)
        yield Moment(
            phase=phase,
            place=place,
            held={
                **loose,
                **_shards(step, layout, reduced=reduced),
                **(_unreduced(moment, place) if phase == "backward" else {}),
                **_gathered(step, layout, phase, place),
            },
        )
    everything = sum(step.trained.values())
    root = _Group(step, layout, "")
    yield Moment(  # the end of backward, where parameters outside of blocks are reduced
        phase="backward",
        place="",
        held={
            **_shards(step, layout, reduced=everything - root.trained),
            ("gather buffers", ""): root.unsharded + root.sent,
            ("gradients", ""): root.gradients,
        },
    )
    yield Moment(
        phase="optimizer",
        held={
            **_shards(step, layout, reduced=everything),
            ("temporaries", ""): round(layout.stepping * everything / layout.shards),
        },
    )


class _Group:
    """Bytes of parameters that are gathered and reduced together."""

    def __init__(self, step: Step, layout: Layout, name: str) -> None:
        self.elements, self.trained = step.elements.get(name, 0), step.trained.get(name, 0)
        alone = layout.shards == 1 and layout.computed == layout.stored  # neither gathered nor cast
        in_float8 = step.in_float8.get(name, 0)
        gathered = layout.computed * (self.elements - in_float8) + layout.gathered_float8 * in_float8
        self.unsharded = 0 if alone else round(gathered)
        self.gradients = round(layout.computed * self.trained)
        self.sent = 0 if layout.devices == 1 else round(layout.reduced * self.trained)


def _shards(step: Step, layout: Layout, *, reduced: int) -> dict[tuple[Kind, str], int]:
    part = 1 / layout.shards
    return {
        ("parameters", ""): round(layout.stored * sum(step.elements.values()) * part),
        ("optimizer state", ""): round(layout.state * sum(step.trained.values()) * part),
        ("gradients", "reduced"): round(layout.stored * reduced * part),
    }


def _reduced(step: Step, moment: Moment) -> int:
    """Return the elements whose gradients are reduced: those of blocks that backward has left."""
    left = {owner for (kind, owner), size in moment.held.items() if kind == "gradients" and size}
    return sum(step.trained.get(owner, 0) for owner in left - {"", moment.place})


def _unreduced(moment: Moment, place: str) -> dict[tuple[Kind, str], int]:
    names = dict.fromkeys(("", place))
    return {("gradients", name): moment.held.get(("gradients", name), 0) for name in names}


def _gathered(step: Step, layout: Layout, phase: Phase, place: str) -> dict[tuple[Kind, str], int]:
    """Return the unsharded parameters: always the root's, those of the running block, and those of the next."""
    order = [name for name in step.elements if name]
    root, here = _Group(step, layout, ""), _Group(step, layout, place)
    held: dict[tuple[Kind, str], int] = {("gather buffers", ""): root.unsharded}
    if not place:
        # Between two blocks and after the last one: the last block is not freed at once.
        blocks = [_Group(step, layout, name) for name in order]
        sizes = [block.unsharded for block in blocks]
        kept = sum(sizes) if layout.sharding != "full" else max(sizes, default=0)
        if layout.whole_graph:
            kept += kept if layout.sharding == "full" else 0  # the next one arrives
            kept += max((b.sent for b in blocks), default=0) if phase == "backward" else 0
        return {**held, ("gather buffers", "blocks"): kept}
    index = order.index(place)
    gathered = here.unsharded
    if layout.sharding != "full":  # kept until backward has passed
        gathered = sum(_Group(step, layout, name).unsharded for name in order[: index + 1])
    arriving = here.unsharded if phase == "forward" else 0
    if phase == "backward" and index and layout.sharding == "full":
        arriving = _Group(step, layout, order[index - 1]).unsharded
    leaving = 0
    if phase == "backward":  # the previous reduction is still running, or its own is
        after = order[index + 1] if index + 1 < len(order) else place
        leaving = max(_Group(step, layout, after).sent, here.sent)
    if layout.shards == 1:
        arriving = 0
    return {**held, ("gather buffers", place): gathered + arriving + leaving}


def between(first: Step, second: Step, share: float) -> Step:
    """Return the step between two with other batch sizes, since memory grows linearly with a batch.

    Args:
        first: The step at 0.
        second: The step at 1.
        share: Between 0 and 1, or beyond.
    """
    return replace(
        first,
        peaks={phase: _mixed(first.peaks[phase], second.peaks[phase], share) for phase in first.peaks},
        loose={key: _mixed(first.loose[key], second.loose[key], share) for key in first.loose if key in second.loose},
        on_host=max(round(first.on_host * (1 - share) + second.on_host * share), 0),
    )


def _mixed(first: Moment, second: Moment, share: float) -> Moment:
    keys = {*first.held, *second.held}
    held = {key: first.held.get(key, 0) * (1 - share) + second.held.get(key, 0) * share for key in keys}
    return replace(first, held={key: round(size) for key, size in held.items() if size > 0})
