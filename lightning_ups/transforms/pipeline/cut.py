"""Where a model is cut into stages, and which rank has which parameters.

A stage is a range of blocks. What comes before the blocks in the order of the model, such as the embedding, belongs to
the first stage, and what comes after them, such as the head, to the last.
"""

from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_ups.transforms.blocks import select_blocks
from lightning_ups.transforms.on_module import OnModule
from lightning_ups.transforms.quoted import listed

Schedule = Literal["1F1B", "interleaved", "zero-bubble"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How a model is cut.

    Args:
        size: The number of ranks.
        schedule: The name of the schedule.
        blocks: The names of all blocks, in order.
        stages: The blocks of each stage, by number.
        ranks: The rank of each stage.
        homes: The rank of each entry of the state dict.
        rank: This rank.
    """

    size: int
    schedule: Schedule
    blocks: tuple[str, ...]
    stages: tuple[range, ...]
    ranks: tuple[int, ...]
    homes: dict[str, int]
    rank: int

    @property
    def own_stages(self) -> list[int]:
        """The stages of this rank."""
        return [stage for stage, rank in enumerate(self.ranks) if rank == self.rank]


_CUT = OnModule[Cut]("pipeline")


def cut_of(model: nn.Module) -> Cut | None:
    """Return how `drop_others` has cut ``model``, or None."""
    return _CUT.get(model)


def absent_state(model: nn.Module) -> set[str]:
    """Return the names in the state dict of the whole ``model`` that other ranks of the pipeline have."""
    cut = cut_of(model)
    return set() if cut is None else {name for name, home in cut.homes.items() if home != cut.rank}


def cut_model(
    model: nn.Module, *, size: int, schedule: Schedule, rank: int, blocks: Sequence[str] | None = None
) -> Cut:
    """Return how to cut ``model`` into stages for ``size`` ranks.

    Args:
        model: The whole model, or one that was cut in the same way.
        size: The number of ranks.
        schedule: The name of the schedule. ``"1F1B"`` has one stage on each rank, the others two.
        rank: This rank.
        blocks: Patterns of the blocks; None: those that repeat.

    Raises:
        ValueError: If the model has no list of blocks that can be cut, or was cut in another way, or if ranks would
            share a parameter.
    """
    if (earlier := cut_of(model)) is not None:
        if (earlier.size, earlier.schedule) != (size, schedule):
            raise ValueError(
                f"{type(model).__name__} was cut by an earlier run with pipeline_parallel_size={earlier.size},"
                f" schedule={earlier.schedule!r}, and each rank has only its stages. Keep both, or build the module"
                " anew and load a checkpoint."
            )
        return earlier
    count = size if schedule == "1F1B" else 2 * size
    names = _list_of_blocks(model, size=size, count=count, patterns=blocks)
    ranks = [stage % size for stage in range(count)]
    if schedule == "zero-bubble":  # the first rank has the first and the last stage
        ranks = [*range(size), *reversed(range(size))]
    stages = _divide(len(names), count)
    of_block = {names[index]: ranks[stage] for stage, own in enumerate(stages) for index in own}
    homes = dict(_homes(model, of_block, first=ranks[0], last=ranks[-1]))
    _refuse_ties(model, homes, names, schedule=schedule)
    return Cut(
        size=size,
        schedule=schedule,
        blocks=names,
        stages=stages,
        ranks=tuple(ranks),
        homes=homes,
        rank=rank,
    )


def _list_of_blocks(model: nn.Module, *, size: int, count: int, patterns: Sequence[str] | None) -> tuple[str, ...]:
    found = select_blocks(model, patterns)
    lists = [*dict.fromkeys(name.rpartition(".")[0] for name in found)]
    looks_for = (
        f"FSDP2Strategy(pipeline_parallel_size={size}) cuts one list of blocks that run one after the other,"
        f" and {type(model).__name__} has"
    )
    if found.origin == "roots" or (len(found) < 2 and patterns is None):
        raise ValueError(
            f"{looks_for} none. Put them into an nn.ModuleList, and call each once, in order, from training_step."
        )
    if len(lists) > 1:
        raise ValueError(f"{looks_for} {listed(lists)}. Name one of them: blocks=['{lists[0]}.*'].")
    if len(found) < count:
        raise ValueError(
            f"{looks_for} {len(found)} in {lists[0]}, fewer than its {count} stages. Use a smaller"
            " pipeline_parallel_size, or schedule='1F1B', which has one stage on each rank."
        )
    return tuple(found)


def _divide(blocks: int, stages: int) -> tuple[range, ...]:
    """Return equal ranges; the last stages, which also have the head, have one block less if it does not divide."""
    base, more = divmod(blocks, stages)
    ends = [base * (stage + 1) + min(stage + 1, more) for stage in range(stages)]
    return tuple(range(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True))


def _homes(model: nn.Module, of_block: dict[str, int], *, first: int, last: int) -> Iterator[tuple[str, int]]:
    """Yield the rank of each entry of the state dict of ``model``."""
    names = [*of_block]
    modules = [name for name, _ in model.named_modules(remove_duplicate=False)]
    start = modules.index(names[0])
    for place, (name, module) in enumerate(model.named_modules(remove_duplicate=False)):
        block = next((block for block in names if name == block or name.startswith(f"{block}.")), None)
        home = of_block[block] if block is not None else first if place < start else last
        for key in _own_state(module):
            yield f"{name}.{key}".removeprefix("."), home


def _own_state(module: nn.Module) -> list[str]:
    hidden: Container[str] = module._non_persistent_buffers_set
    buffers = [name for name, buffer in module._buffers.items() if buffer is not None and name not in hidden]
    return [*(name for name, p in module._parameters.items() if p is not None), *buffers]


def _refuse_ties(model: nn.Module, homes: dict[str, int], blocks: Sequence[str], *, schedule: Schedule) -> None:
    names: dict[nn.Parameter, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(p, []).append(name)
    for its in names.values():
        ranks = {homes[name] for name in its}
        if len(ranks) > 1:
            of_block = any(name.startswith(f"{block}.") for name in its for block in blocks)
            cure = (
                "Give each module a parameter of its own"
                if of_block or schedule == "zero-bubble"
                else "Use schedule='zero-bubble', where one rank has the first and the last stage"
            )
            raise ValueError(
                f"{' and '.join(its[:3])} are one parameter, in stages on different ranks of the pipeline. {cure}."
            )


@torch.no_grad()
def drop_others(model: nn.Module, cut: Cut, *, device: torch.device) -> None:
    """Remove from ``model`` what other ranks have. Modules and names stay.

    In the place of a parameter there is a tensor that is NaN: results of another stage must not depend on it. A buffer
    stays, and is not in the state dict.
    """
    if cut_of(model) is not None:
        return
    for name, module in model.named_modules():
        for key in _own_state(module):
            if cut.homes[f"{name}.{key}".removeprefix(".")] == cut.rank:
                continue
            if key in module._parameters:
                nothing = _nothing_like(p := module._parameters.pop(key), device)
                setattr(module, key, nothing.requires_grad_(p is not None and p.requires_grad))
            else:
                module._non_persistent_buffers_set.add(key)
    _CUT.keep(model, cut)


@contextmanager
def showing_others(model: nn.Module) -> Iterator[None]:
    """Let ``model.parameters()`` return the NaN of `drop_others` too, for steps that read all parameters."""
    shown: list[tuple[dict[str, Any], str]] = []
    for name in absent_state(model):
        place, _, key = name.rpartition(".")
        module = model.get_submodule(place)
        if key in vars(module):
            shown.append((module._parameters, key))
            module._parameters[key] = vars(module)[key]
    try:
        yield
    finally:
        for parameters, key in shown:
            del parameters[key]


def _nothing_like(parameter: Tensor | None, device: torch.device) -> Tensor:
    assert parameter is not None
    if isinstance(parameter, DTensor):  # tensor parallelism has split it
        part = _nothing_like(parameter.to_local(), device)
        whole = {"shape": parameter.shape, "stride": parameter.stride()}
        return DTensor.from_local(part, parameter.device_mesh, parameter.placements, run_check=False, **whole)
    number = float("nan") if parameter.is_floating_point() or parameter.is_complex() else 0
    return torch.full((), number, dtype=parameter.dtype, device=device).expand(parameter.shape)  # without memory
