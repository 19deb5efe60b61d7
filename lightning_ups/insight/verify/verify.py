"""Comparing two trainings of one module from the same weights on the same batches, block by block.

Of every step there are the loss, the norm of the gradient and, for each block, what it got and what it made of it in
forward and in backward. How far two correct trainings may be apart is not guessed: a second reference, which rounds
as the configuration says it does, shows it.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

import torch
from torch import Tensor

__all__ = [
    "REST",
    "Band",
    "BlockStep",
    "Departure",
    "Step",
    "band_between",
    "departures",
    "first_block",
    "is_same",
    "sampled",
]

What = Literal["input", "output", "gradient passed on", "gradient", "gradient norm", "loss"]
REST = "outside the blocks"
FACTOR = 2.0  # how many times as far from the reference as the second reference is, another training may be
FLOOR = 1e-6  # of every distance: two orders of summation in float32
_SAMPLE = 2**16  # values of a tensor that are compared


@dataclass
class BlockStep:
    """What one block did in one step.

    Args:
        given: The input that came to it in its first call; a sample, as all of these. None: it did not run.
        added: What it added to its input, or its output if that has another shape.
        passed: The gradient that it passed on, of its input.
        gradient: The gradient of its parameters. None: there is none.
        norm: The norm of all of that gradient.
    """

    given: Tensor | None = None
    added: Tensor | None = None
    passed: Tensor | None = None
    gradient: Tensor | None = None
    norm: float = 0.0


@dataclass
class Step:
    """What happened in one step.

    Args:
        loss: The loss, of the last microbatch. None: the step returned none.
        norm: The norm of the gradient, before it is clipped.
        blocks: The blocks by name, in the order of the model; what is in none of them is the last.
    """

    loss: float | None = None
    norm: float = math.nan
    blocks: dict[str, BlockStep] = field(default_factory=dict)


def sampled(tensor: Tensor) -> Tensor:
    """Return values of ``tensor``, all or those at places that depend on their number alone, as float32 on the CPU."""
    flat = tensor.detach().flatten()
    if flat.numel() > _SAMPLE:
        places = torch.randint(flat.numel(), (_SAMPLE,), generator=torch.Generator().manual_seed(flat.numel()))
        flat = flat[places.to(flat.device)]
    return flat.float().cpu()


@dataclass(frozen=True, kw_only=True)
class Departure:
    """A distance between two trainings.

    Args:
        step: The number of the step.
        block: The block; None: the whole model.
        what: Of what.
        distance: How large it is.
        allowed: How large it may be.
    """

    step: int
    block: str | None
    what: What
    distance: float
    allowed: float = math.inf

    @property
    def excess(self) -> float:
        """How many times as large as allowed it is."""
        return self.distance / self.allowed if self.distance == self.distance else math.inf  # NaN is too far


Band = Mapping[tuple[int, str | None, What], float]


def distances(reference: Sequence[Step], other: Sequence[Step]) -> Iterator[Departure]:
    """Yield every distance of ``other`` from ``reference``, in the order of the steps and of the model."""
    for number, (right, found) in enumerate(zip(reference, other, strict=False)):
        for name, block in right.blocks.items():
            for what, distance in _of_block(block, found.blocks.get(name, BlockStep())):
                yield Departure(step=number, block=name, what=what, distance=distance)
        yield Departure(step=number, block=None, what="gradient norm", distance=_ratio(right.norm, found.norm))
        yield Departure(step=number, block=None, what="loss", distance=_of_loss(right.loss, found.loss))


def _of_loss(right: float | None, found: float | None) -> float:
    if right is None or found is None:
        return 0.0 if right is found else math.inf
    return abs(found - right) / max(abs(right), 1e-12)


def _of_block(right: BlockStep, found: BlockStep) -> Iterator[tuple[What, float]]:
    if right.given is not None:
        yield "input", _relative(right.given, found.given)
    if right.added is not None:
        yield "output", _relative(right.added, found.added)
    if right.passed is not None:
        yield "gradient passed on", _angle(right.passed, found.passed)
    if right.gradient is not None:
        yield "gradient", _angle(right.gradient, found.gradient)
        yield "gradient norm", _ratio(right.norm, found.norm)


def band_between(reference: Sequence[Step], second: Sequence[Step]) -> Band:
    """Return how far from ``reference`` a training may be, by what a second reference shows.

    A loss and a norm are sums, in which errors happen to cancel: what they may differ by is not taken from one such
    accident, but also from the distances of all blocks in that step.
    """
    found = [*distances(reference, second)]
    typical: dict[int, float] = {}
    for number in {each.step for each in found}:
        angles = [
            e.distance for e in found if e.step == number and e.what in ("output", "gradient") and e.distance < math.inf
        ]
        typical[number] = median(angles) if angles else 0.0
    angle = {(e.step, e.block): e.distance for e in found if e.what == "gradient"}
    band: dict[tuple[int, str | None, What], float] = {}
    for each in found:
        least = FLOOR
        if each.what == "gradient norm":
            least = max(least, 0.5 * angle.get((each.step, each.block), typical[each.step]))
        if each.what == "loss":
            least = max(least, 0.25 * typical[each.step])
        band[each.step, each.block, each.what] = FACTOR * max(each.distance, least)
    return band


def departures(reference: Sequence[Step], other: Sequence[Step], band: Band) -> list[Departure]:
    """Return the distances that leave ``band``."""
    if len(other) < len(reference):
        return [Departure(step=len(other), block=None, what="loss", distance=math.nan, allowed=0.0)]
    return [each for each in _allowed(distances(reference, other), band) if not each.distance <= each.allowed]


def largest(reference: Sequence[Step], other: Sequence[Step], band: Band) -> Departure:
    """Return the distance that comes nearest to its bound, or goes furthest beyond."""
    return max(_allowed(distances(reference, other), band), key=lambda each: each.excess)


def _allowed(found: Iterable[Departure], band: Band) -> Iterator[Departure]:
    for each in found:
        key = (each.step, each.block, each.what)
        yield Departure(
            step=each.step, block=each.block, what=each.what, distance=each.distance, allowed=band.get(key, math.inf)
        )


def first_block(found: Sequence[Departure], blocks: Sequence[str]) -> str | None:
    """Return the block in which something went wrong first; None if none of the distances is that of a block.

    In forward it is the first that gave what it should not, and in backward the last. What a block is given wrongly
    was made by the one before it, or, for the first, outside the blocks.

    Args:
        found: Distances that left the band.
        blocks: The names of the blocks, in the order of the model.
    """
    of_blocks = [each for each in found if each.block is not None]
    if not of_blocks:
        return None
    of_step = [each for each in of_blocks if each.step == min(other.step for other in of_blocks)]
    before = dict(zip(blocks, (REST, *blocks), strict=False))
    for name in blocks:
        kinds = {each.what for each in of_step if each.block == name}
        if "input" in kinds:
            return before[name]
        if "output" in kinds:
            return name
    gone = {each.block for each in of_step}
    return next((name for name in reversed(blocks) if name in gone), REST)


def is_same(reference: Sequence[Step], other: Sequence[Step]) -> bool:
    """Return whether two trainings agree in every bit."""
    return len(reference) == len(other) and all(each.distance == 0 for each in distances(reference, other))


def _relative(right: Tensor, found: Tensor | None) -> float:
    if found is None or found.shape != right.shape:
        return math.inf
    return ((found - right).norm() / right.norm().clamp_min(1e-30)).item()


def _angle(right: Tensor, found: Tensor | None) -> float:
    """Return the distance of the two as unit vectors: the square root of twice what the cosine lacks to one."""
    if found is None:
        found = torch.zeros_like(right)
    if found.shape != right.shape:
        return math.inf
    sizes = right.norm(), found.norm()
    if sizes[0] == 0 or sizes[1] == 0:
        return 0.0 if sizes[0] == sizes[1] else math.sqrt(2)
    return (right / sizes[0] - found / sizes[1]).norm().item()


def _ratio(right: float, found: float) -> float:
    if right == found:
        return 0.0
    return abs(math.log(found / right)) if found > 0 and right > 0 else math.inf if found == found else math.nan
