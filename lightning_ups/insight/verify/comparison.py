"""The comparison of two trainings of one module, from the same weights on the same batches, block by block.

Each step has a loss, a gradient norm and, for each block, its inputs and outputs in forward and backward. The allowed
distance is measured: by a second reference training, which rounds as the configuration does.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

import torch
from torch import Tensor

What = Literal["input", "output", "gradient passed on", "gradient", "gradient norm", "loss"]
REST = "outside the blocks"
FACTOR = 2.0  # the allowed distance, relative to that of the second reference
FLOOR = 1e-6  # the least allowed distance: another order of summation in float32
_SAMPLE = 2**16  # values of a tensor that are compared


@dataclass
class BlockStep:
    """Sampled values of one block in one step.

    Args:
        given: The input of its first call. None: it did not run.
        added: Its output minus its input, or its output if that has another shape.
        passed: The gradient of its input.
        gradient: The gradient of its parameters. None: there is none.
        norm: The norm of the complete gradient.
    """

    given: Tensor | None = None
    added: Tensor | None = None
    passed: Tensor | None = None
    gradient: Tensor | None = None
    norm: float = 0.0


@dataclass
class Step:
    """The values of one step.

    Args:
        loss: The loss of the last microbatch. None: the step returned none.
        norm: The gradient norm before clipping.
        blocks: The blocks by name, in the order of the model, and last the parameters outside of blocks.
    """

    loss: float | None = None
    norm: float = math.nan
    blocks: dict[str, BlockStep] = field(default_factory=dict)


def sampled(tensor: Tensor) -> Tensor:
    """Return the values of ``tensor`` as float32 on the CPU, or a fixed sample of them if there are many."""
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
        """The distance relative to the allowed one."""
        return self.distance / self.allowed if self.distance == self.distance else math.inf  # NaN is too far


Band = Mapping[tuple[int, str | None, What], float]


def distances(reference: Sequence[Step], other: Sequence[Step]) -> Iterator[Departure]:
    """Yield all distances of ``other`` from ``reference``, in the order of steps and blocks."""
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
    """Return the allowed distances from ``reference``, measured by a second reference.

    Errors may cancel in a loss or a norm, so that their allowed distance also depends on the blocks of that step.
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
    """Return the distances outside of ``band``."""
    if len(other) < len(reference):
        return [Departure(step=len(other), block=None, what="loss", distance=math.nan, allowed=0.0)]
    return [each for each in _allowed(distances(reference, other), band) if not each.distance <= each.allowed]


def largest(reference: Sequence[Step], other: Sequence[Step], band: Band) -> Departure:
    """Return the largest distance relative to the allowed one."""
    return max(_allowed(distances(reference, other), band), key=lambda each: each.excess)


def _allowed(found: Iterable[Departure], band: Band) -> Iterator[Departure]:
    for each in found:
        key = (each.step, each.block, each.what)
        yield Departure(
            step=each.step, block=each.block, what=each.what, distance=each.distance, allowed=band.get(key, math.inf)
        )


def first_block(found: Sequence[Departure], blocks: Sequence[str]) -> str | None:
    """Return the block with the first error, or None if no distance belongs to a block.

    That is the first block with a wrong output in forward, or the last one in backward. A wrong input comes from the
    previous block, or from outside the blocks.

    Args:
        found: Distances outside of the band.
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
    """Return whether two trainings are equal bit for bit."""
    return len(reference) == len(other) and all(each.distance == 0 for each in distances(reference, other))


def _relative(right: Tensor, found: Tensor | None) -> float:
    if found is None or found.shape != right.shape:
        return math.inf
    return ((found - right).norm() / right.norm().clamp_min(1e-30)).item()


def _angle(right: Tensor, found: Tensor | None) -> float:
    """Return the distance between the two normalized vectors."""
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
