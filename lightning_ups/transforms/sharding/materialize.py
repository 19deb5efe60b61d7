"""Initializes a sharded model that was built on the meta device: the same weights on any number of devices."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_ups._compat.torch.fsdp.recording import Loose, Place, Recording, record_resets, replay
from lightning_ups._compat.torch.fsdp.state import allocate
from lightning_ups.transforms.quoted import listed
from lightning_ups.transforms.sharding.mesh import local_part


def is_on_meta(model: nn.Module) -> bool:
    """Return whether any parameter or buffer of ``model`` is on the meta device."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


class Initialisation:
    """How the tensors of a model on the meta device get their values, recorded before anything replaces its parameters.

    Args:
        record: The recorded operations that compute the values.
        places: The recorded tensor of each parameter and buffer.
        loose: Tensors that are neither parameters nor buffers, such as the numbers of tokens in PEFT's prompt tuning.
    """

    def __init__(self, record: Recording, places: Mapping[str, Place], loose: Mapping[str, Loose]) -> None:
        self._record, self._places, self._loose = record, places, loose

    def __len__(self) -> int:
        return len(self._places)

    def run(self, model: nn.Module, *, shards_on: torch.device, device: torch.device, draw_on: torch.device) -> None:
        """Give ``model`` memory and values, one whole tensor at a time, of which each rank keeps its part.

        Args:
            model: The model on the meta device, sharded or not.
            shards_on: The device of shards.
            device: The device of everything else.
            draw_on: The device that draws random values: the CPU for a model that was built there.
        """
        ties = _ties(model)
        allocate(model, shards_on=shards_on, rest_on=device)
        _tie(model, ties)
        targets: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        targets |= dict(model.named_buffers(remove_duplicate=False))

        @torch.no_grad()
        def keep(name: str, whole: Tensor) -> None:
            if name not in targets:
                loose = self._loose[name]
                loose.holder[loose.key] = whole.to(device, copy=True)
                return
            target = targets[name]
            if isinstance(target, DTensor):
                target.to_local().copy_(local_part(whole, target))
            else:
                target.copy_(whole)

        with _generator(self._record), _same_on_all_ranks(draw_on):
            here = {name: place for name, place in self._places.items() if name in targets}  # not of other stages
            wanted = {name: loose.place for name, loose in self._loose.items()} | here
            missing = replay(self._record, wanted, keep, device=draw_on)
        if missing:
            raise ValueError(_refused(model, missing))


def plan_initialisation(model: nn.Module, record: Recording | None) -> Initialisation:
    """Return how ``model``, on the meta device, gets its values: as recorded, or by ``reset_parameters()``.

    Raises:
        ValueError: If neither is possible; the error names the modules.
    """
    if record is not None:
        places = record.places(model)
        if all(record.knows(place) for place in places.values()):
            return Initialisation(record, places, record.loose(model))
    resets, unknown = record_resets(model)
    places = resets.places(model)
    unknown += [name for name, place in places.items() if not resets.knows(place)]
    if unknown:
        raise ValueError(_refused(model, unknown))
    return Initialisation(resets, places, {})


def _refused(model: nn.Module, names: list[str]) -> str:
    return (
        f"The initialisation of {type(model).__name__} cannot be repeated for {listed([*dict.fromkeys(names)])}: it was"
        " on the meta device before fit, and its reset_parameters() do not cover them."
        " Build the module in configure_model, under torch.device('meta') if it is large, or build it in place."
    )


def _ties(model: nn.Module) -> list[list[str]]:
    names: dict[nn.Parameter, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(p, []).append(name)
    return [its for p, its in names.items() if len(its) > 1 and p.is_meta]


def _tie(model: nn.Module, ties: list[list[str]]) -> None:
    # Allocating a plain tensor creates a new Parameter in each of its places.
    for first, *others in ties:
        parameter = model.get_parameter(first)
        for name in others:
            owner, _, last = name.rpartition(".")
            if model.get_parameter(name) is not parameter:
                setattr(model.get_submodule(owner), last, parameter)


@contextmanager
def _generator(record: Recording) -> Iterator[None]:
    """Draw from rank 0's states, and continue as if the model had been built then, if nothing was drawn since."""
    now, last = torch.get_rng_state(), record.states[-1]
    own = record.states
    if dist.is_initialized():
        box = [own]
        dist.broadcast_object_list(box, src=0)
        record.states = box[0]
    torch.set_rng_state(record.states[0])
    yield
    if not torch.equal(now, last) or not torch.equal(last, record.states[-1]):
        torch.set_rng_state(now)


@contextmanager
def _same_on_all_ranks(device: torch.device) -> Iterator[None]:
    """Draw from rank 0's generator of ``device``, unless it is the CPU."""
    if device.type != "cuda" or not dist.is_initialized():
        yield
        return
    own = torch.cuda.get_rng_state(device)
    box = [own]
    dist.broadcast_object_list(box, src=0)
    torch.cuda.set_rng_state(box[0], device)
    yield
    if not torch.equal(box[0], own):
        torch.cuda.set_rng_state(own, device)
