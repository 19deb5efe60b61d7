"""Blocks that are compiled together, and what became of them."""

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from lightning_ups._compat.torch.compile import dynamo
from lightning_ups.transforms.compile.frame import Compiler, Frame
from lightning_ups.transforms.compile.gain import Gain

Phase = Literal["training", "evaluation"]  # with gradients, and without

LITTLE = 1.1  # times as fast
MOST_MEASUREMENTS = 5  # that may fail, as where a call needs another graph


@dataclass(eq=False)
class Group:
    """Blocks that share a frame in training, and what became of them in this run.

    Args:
        kind: The name of their class.
        frame: What they share.
    """

    kind: str
    frame: Frame
    evaluation: dict[str, Frame] = field(default_factory=dict)  # the frames in which they are evaluated, by block
    ran: set[Phase] = field(default_factory=set)
    proven: set[Phase] = field(default_factory=set)  # that it is compiled
    eager: dict[Phase, str] = field(default_factory=dict)  # why
    untried: set[str] = field(default_factory=set)  # why a graph had no trial
    told: set[Hashable] = field(default_factory=set)
    apart: list[Frame] = field(default_factory=list)  # frames for training calls beside the one that is replayed
    gain: Gain | None = None  # of one of the blocks
    measurements: int = 0

    def __post_init__(self) -> None:
        self._before: dict[Frame, tuple[int, int]] = {}
        self._remember(self.frame)

    def add(self, block: str, evaluation: Frame) -> None:
        """Take in a block, or let one that is there be evaluated in another frame."""
        self.evaluation[block] = evaluation
        self._remember(evaluation)

    def add_apart(self, frame: Frame) -> None:
        """Take in a frame for calls beside the one that is replayed."""
        self.apart.append(frame)
        self._remember(frame)

    def _remember(self, frame: Frame) -> None:
        self._before.setdefault(frame, (frame.graphs, len(frame.recompiles)))

    @property
    def blocks(self) -> list[str]:
        """The names of the blocks."""
        return [*self.evaluation]

    @property
    def frames(self) -> list[Frame]:
        """All frames in which the blocks are called."""
        return [self.frame, *dict.fromkeys((*self.apart, *self.evaluation.values()))]

    def __str__(self) -> str:
        more = f" and {len(self.blocks) - 1} equal blocks" if len(self.blocks) > 1 else ""
        return f"{self.blocks[0]}{more} ({self.kind})"

    @property
    def is_unmeasured(self) -> bool:
        """Whether it is still to be measured what compiling gains."""
        return self.gain is None and self.measurements < MOST_MEASUREMENTS and "training" in self.proven

    @property
    def gains_little(self) -> bool:
        """Whether compiling a block was measured to gain next to nothing."""
        return self.gain is not None and self.gain.eager_ms < LITTLE * self.gain.compiled_ms

    def new_graphs(self, frame: Frame) -> int:
        """Return how many graphs were made of ``frame`` in this run."""
        return frame.graphs - self._before[frame][0]

    def recompiles(self, frame: Frame) -> list[str]:
        """Return the guards for which ``frame`` was compiled again in this run."""
        return frame.recompiles[self._before[frame][1] :]

    @property
    def summary(self) -> str:
        """One line of it for people."""
        facts = self.facts
        parts = [
            _number(facts["graphs"], "graph"),
            _number(sum(facts["breaks"].values()), "graph break") + "".join(f" [{why}]" for why in facts["breaks"]),
            _number(sum(facts["recompiles"].values()), "recompile"),
            f"{facts['seconds']:.1f} s",
        ]
        if facts["from_cache"]:
            parts.append(f"{facts['from_cache']} from the cache")
        if len({*self.eager.values()}) < len(self.eager):
            parts.append(f"uncompiled: {self.eager['training']}")
        else:
            parts += [f"uncompiled in {phase}: {why}" for phase, why in self.eager.items()]
        return f"{self}: {', '.join(parts)}"

    @property
    def facts(self) -> dict[str, Any]:
        """All of it as values that JSON knows."""
        return {
            "class": self.kind,
            "blocks": self.blocks,
            "ran": bool(self.ran),
            "eager": dict(self.eager),
            "untried": sorted(self.untried),
            "gain": None if self.gain is None else asdict(self.gain),
            **self.facts_of(self.frames),
        }

    def facts_of(self, frames: Sequence[Frame]) -> dict[str, Any]:
        """What became of ``frames``, which are some of those of the blocks."""
        return {
            "graphs": sum(frame.graphs for frame in frames),
            "new_graphs": sum(map(self.new_graphs, frames)),
            "from_cache": sum(frame.cache_hits for frame in frames),
            "breaks": dict(Counter(reason for frame in frames for reason in frame.breaks)),
            "recompiles": dict(Counter(guard for frame in frames for guard in self.recompiles(frame))),
            "seconds": round(sum(frame.seconds for frame in frames), 3),
            "no_cuda_graphs": sorted({reason for frame in frames for reason in frame.no_cuda_graphs}),
        }


def worth_telling(
    what: str, frame: Frame, recompiles: Sequence[str], *, max_recompiles: int, compiler: Compiler
) -> Iterator[tuple[str, str]]:
    """Yield what the user should know after something was compiled, each with its topic.

    Args:
        what: The blocks, and when they are called in ``frame``, for people.
        frame: What was compiled.
        recompiles: The guards for which it was compiled again in this run.
        max_recompiles: How many of these are not worth telling.
        compiler: What was asked for. With ``fullgraph``, what runs uncompiled is an error, which says itself what it is
            about.
    """
    guard = recompiles[-1] if recompiles else "unknown"
    cure, fullgraph = cure_of(guard, compiler), compiler.fullgraph
    if frame.full and frame.differ:
        yield (
            "differ",
            f"Compile makes graphs of their own for {what}: the blocks look equal and are not, the last guard to fail"
            f" was: {guard}. Compiling takes longer for it, and nothing else changes."
            " Give the blocks equal attributes where they can be equal, to compile them once.",
        )
    elif frame.full and not fullgraph:
        yield (
            "full",
            f"{what} has {frame.num_compiled} graphs and gets no more: Dynamo's limit is reached. Calls that fit none"
            f" of them run uncompiled from now on; the last guard to fail was: {guard}. {cure}",
        )
    elif frame.num_compiled >= dynamo.recompile_limit() and not frame.differ and not frame.full:
        past_limit = "be an error" if fullgraph else "run uncompiled, in silence"
        yield (
            "last",
            f"{what} has {frame.num_compiled} graphs, as many as Dynamo allows. A call that fits none of them would"
            f" {past_limit}; the last guard to fail was: {guard}. {cure}",
        )
    elif len(recompiles) > max_recompiles and not frame.differ:
        yield (
            "recompiles",
            f"{what} was compiled {len(recompiles)} times more than once. Each time costs as much as the"
            f" first; the last guard to fail was: {guard}. {cure}",
        )
    if frame.full_inside:
        yield (
            "inside",
            f"A function that {what} calls after a graph break has reached Dynamo's limit of graphs. It runs"
            f" uncompiled from now on where none of them fits; the graph breaks are: {'; '.join(set(frame.breaks))}."
            " Remove the graph break; Compile(fullgraph=True) shows where it is.",
        )
    if compiler.cuda_graphs and frame.no_cuda_graphs:
        yield (
            "cuda graphs",
            f"Inductor records no CUDA graph of a part of {what}: {frame.no_cuda_graphs[-1]}. That part is launched"
            " kernel by kernel, as with mode='default'. Remove what it names, or set Compile(mode='default').",
        )


def cure_of(guard: str, compiler: Compiler) -> str:
    """Return what the user can do so that ``guard``, of a graph that ``compiler`` made, does not fail."""
    kind = dynamo.guard_kind(guard)
    return _CURE_OF_FIXED_SIZES if kind == "shape" and compiler.dynamic else _CURES[kind]


_CURE_OF_FIXED_SIZES = (
    "Give it inputs of one shape (drop_last=True, padding), or let no loop and no branch in it depend on a size: such a"
    " size is fixed in a graph, with dynamic=True as well."
)
_CURES: dict[dynamo.GuardKind, str] = {
    "shape": "Give it inputs of one shape (drop_last=True, padding), or set Compile(dynamic=True).",
    "value": "An argument or an attribute changes from step to step: keep it constant, or make it a tensor.",
    "gradients": (
        "Let the same inputs and parameters need gradients in each call: detach() inputs that need none, and freeze"
        " parameters before the run."
    ),
    "other": (
        "Keep what it is given, its attributes and modes such as autocast and no_grad as they are from call to call."
    ),
}


def _number(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
