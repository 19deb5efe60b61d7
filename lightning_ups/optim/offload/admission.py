"""Finding out, on tiny tensors, whether an optimizer may be stepped in chunks: by doing it both ways."""

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_ups._compat.torch.optimizers import has_modes, needs_closure
from lightning_ups._compat.torch.tensors.tensors import local_of
from lightning_ups.optim.offload.chunks import PART, is_large, nbytes_of
from lightning_ups.optim.offload.memory import plain_parts

STEPS = 3
LENGTHS = {1: 4 * PART, 2: 64, 3: 16}  # of a side of a tiny tensor, by its number of dimensions; beyond, 8
EACH = 3  # tiny tensors for each group


@dataclass(frozen=True, kw_only=True)
class Admission:
    """What is known of an optimizer that may be stepped in chunks."""

    parted: bool  # a parameter may be stepped in parts, since each element is treated by itself
    state_bytes: float  # for each byte of a parameter


@dataclass(frozen=True, kw_only=True)
class _Drawn:
    """The gradients of a trial."""

    absent: bool = False  # one parameter has none in the first step
    sparse: bool = False  # those of matrices have few rows, as an embedding's may
    begun: bool = False  # the optimizer has made its state before the first step


# The first that it takes: torch's fused SGD wants all or none, SparseAdam nothing dense, and Adagrad the state it made.
_DRAWN = _Drawn(absent=True), _Drawn(), _Drawn(sparse=True), _Drawn(absent=True, begun=True)
_ERRORS = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)

MakeOurs = Callable[[Optimizer, Admission], Optimizer]


def admit(optimizer: Optimizer, ours: MakeOurs, *, in_parts: bool, device: torch.device | None = None) -> Admission:
    """Return what is known of ``optimizer``, whose twins are stepped as a whole and in chunks.

    Args:
        optimizer: Of any class; it is not touched.
        ours: Returns an optimizer that steps another in chunks, of one parameter or, where admitted, a part of one.
        in_parts: Whether parts shall be tried as well.
        device: Where it will step. None: where its parameters are.

    Raises:
        ValueError: If the two end at other bits, or the optimizer cannot be stepped so at all.
    """
    name = type(optimizer).__name__
    _refuse_by_form(optimizer, name)
    drawn, whole, state_bytes = _as_a_whole(optimizer, name, device)
    in_chunks, _ = _outcome(optimizer, lambda twin: ours(twin, Admission(parted=False, state_bytes=1.0)), device, drawn)
    if not _same(whole, in_chunks):
        raise ValueError(
            f"{name} cannot be offloaded: stepping tiny parameters one by one ended at other values than all at once."
            " Its step looks at all of them, counts its calls, or keeps its state elsewhere than in `state`."
            " Use an optimizer such as AdamW, or leave the offloading out."
        )
    parted = in_parts and not drawn.sparse and _in_parts(optimizer, ours, whole, device, drawn)
    return Admission(parted=parted, state_bytes=state_bytes)


def _refuse_by_form(optimizer: Optimizer, name: str) -> None:
    state = isinstance(getattr(optimizer, "state", None), defaultdict)
    is_torchs = state and isinstance(getattr(optimizer, "defaults", None), dict)
    parameters = [p for group in optimizer.param_groups for p in group["params"]] if is_torchs else []
    wrong = {
        "its step calls the closure, so that every parameter is stepped at once."
        " Use an optimizer whose step needs no closure, such as AdamW.": needs_closure(optimizer),
        "its train() and eval() put other weights in place, by state that is on the host."
        " Use an optimizer with one set of weights, such as AdamW, or leave the offloading out.": has_modes(optimizer),
        "it has no `defaults` or no `state` as optimizers of torch have, and may wrap another."
        " Give the optimizer inside it, such as torch.optim.AdamW.": not is_torchs,
        "a parameter of it has no shape yet, since it belongs to a lazy module."
        " Run one batch through the module before fit, or give it its sizes.": any(map(is_lazy, parameters)),
    }
    for why in (why for why, holds in wrong.items() if holds):
        raise ValueError(f"{name} cannot be offloaded: {why}")


def _as_a_whole(optimizer: Optimizer, name: str, device: torch.device | None) -> tuple[_Drawn, list[Tensor], float]:
    """Return the gradients that ``optimizer`` takes, and the outcome of stepping all parameters together with them."""
    first: BaseException | None = None
    for drawn in _DRAWN:
        try:
            return drawn, *_outcome(optimizer, None, device, drawn)
        except _ERRORS as error:
            first = first or error
    where = "the device of its parameters" if device is None else str(device)
    raise ValueError(
        f"{name} cannot be offloaded: on {where} it does not step tiny tensors ({type(first).__name__}: {first})."
        " Try its step by itself first, with the options that it has here, or use another optimizer, such as AdamW."
    ) from first


def _in_parts(
    optimizer: Optimizer, ours: MakeOurs, whole: list[Tensor], device: torch.device | None, drawn: _Drawn
) -> bool:
    if not _keeps_elements(optimizer, device, drawn):
        return False
    try:
        parts, _ = _outcome(optimizer, lambda twin: ours(twin, Admission(parted=True, state_bytes=1.0)), device, drawn)
    except _ERRORS:
        return False  # it asks for matrices, say, and a part is none
    return _same(whole, parts)


def _keeps_elements(optimizer: Optimizer, device: torch.device | None, drawn: _Drawn) -> bool:
    """Return whether each tensor of state has one number for each of its parameter's, of the same type."""
    with _seeded(optimizer) as random:
        twin = twin_of(optimizer, device, begun=drawn.begun, random=random)
        names = []
        for step in range(STEPS):
            _fill_gradients(twin, step, drawn, random)
            twin.step()
            names.append([sorted(map(str, state)) for state in twin.state.values()])
        values = [(p, value) for p, state in twin.state.items() for value in state.values()]
        if any(not isinstance(value, Tensor) and any(map(is_large, _tensors_in(value))) for _, value in values):
            return False
        pairs = [(p, value) for p, value in values if is_large(value)]
    same = all(v.shape == p.shape and v.dtype is p.dtype and len(plain_parts(v)) == 1 for p, v in pairs)
    return same and all(found == names[-1] for found in names[1:])


def _outcome(
    optimizer: Optimizer, ours: Callable[[Optimizer], Optimizer] | None, device: torch.device | None, drawn: _Drawn
) -> tuple[list[Tensor], float]:
    """Return the bits of all parameters and of all state after some steps, and the share of the state."""
    with _seeded(optimizer) as random:
        twin = twin_of(optimizer, device, begun=drawn.begun, random=random)
        stepped = twin if ours is None else ours(twin)
        for step in range(STEPS):
            _fill_gradients(twin, step, drawn, random)
            stepped.step()
        parameters = [p for group in twin.param_groups for p in group["params"]]
        state = stepped.state_dict()["state"]
        kept = [state[key] for key in sorted(state, key=str) if isinstance(state[key], dict)]
        values = [entries[name] for entries in kept for name in sorted(entries, key=str)]
        tensors = [tensor for value in values for tensor in _tensors_in(value)]
        share = sum(nbytes_of(v) for v in tensors if is_large(v)) / max(sum(map(nbytes_of, parameters)), 1)
        options = [
            torch.as_tensor(value)
            for group in twin.param_groups
            for value in group.values()
            if isinstance(value, (int, float, Tensor))
        ]
        found = [part.detach().cpu().clone() for t in (*parameters, *tensors, *options) for part in plain_parts(t)]
    return found, share


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(inner)


def _same(ones: list[Tensor], others: list[Tensor]) -> bool:
    if [(t.shape, t.dtype) for t in ones] != [(t.shape, t.dtype) for t in others]:
        return False
    pairs = zip(ones, others, strict=True)
    return all(
        torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))
        for a, b in pairs
    )


def twin_of(
    optimizer: Optimizer,
    device: torch.device | None = None,
    *,
    random: torch.Generator | None = None,
    begun: bool = False,
) -> Optimizer:
    """Return an optimizer like ``optimizer`` over tiny parameters on ``device``, with no hooks.

    It has no state unless ``begun``, and then one of as many entries, each full of its first number.
    """
    tiny = {p: _tiny(p, device, random) for group in optimizer.param_groups for p in _chosen(group["params"])}
    twin = object.__new__(type(optimizer))
    apart = {"state", "param_groups", "step"}  # `step`: a scheduler's, which counts
    hooks = {name for name in vars(optimizer) if name.startswith("_optimizer_") and name.endswith("_hooks")}
    memo: dict[int, Any] = {id(p): other for p, other in tiny.items()}
    rest = {n: v for n, v in vars(optimizer).items() if n not in apart | hooks}
    vars(twin).update(copy.deepcopy(rest, memo))
    vars(twin).update({name: OrderedDict() for name in hooks}, state=defaultdict(dict))
    twin.param_groups = [
        {
            **{name: _copied(value) for name, value in group.items() if name not in ("params", "param_names")},
            "params": [tiny[p] for p in group["params"] if p in tiny],
        }
        for group in optimizer.param_groups
    ]
    twin.param_groups = [group for group in twin.param_groups if group["params"]]
    if begun:
        for p, other in tiny.items():
            if p in optimizer.state:
                twin.state[other] = {name: _begun(v, p, other) for name, v in optimizer.state[p].items()}
    return twin


def _begun(value: Any, parameter: nn.Parameter, tiny: nn.Parameter) -> Any:
    if not isinstance(value, Tensor) or value.shape != parameter.shape or not value.dim():
        return _copied(value)
    first = local_of(value).reshape(-1)[:1].sum().item()
    return torch.full_like(tiny.detach(), first, dtype=value.dtype)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.copy(value)


def _chosen(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    """Return a few of a group's parameters, with every number of dimensions among them."""
    first = {p.dim(): p for p in reversed(parameters)}
    wanted = {*first.values(), *parameters[:EACH]}
    return [p for p in parameters if p in wanted]


def _tiny(parameter: nn.Parameter, device: torch.device | None, random: torch.Generator | None) -> nn.Parameter:
    local = local_of(parameter)
    side = LENGTHS.get(local.dim(), 8)
    data = torch.randn([side] * local.dim(), generator=random).to(device or local.device, local.dtype)
    if device is None:  # elsewhere than on its mesh there are but local parts
        data = _like(data, parameter)
    return nn.Parameter(data, requires_grad=parameter.requires_grad)


def _like(local: Tensor, parameter: nn.Parameter) -> Tensor:
    """Return ``local`` as this rank's part of a tensor that is sharded as ``parameter`` is.

    Drawing numbers as a sharded tensor would change what all ranks draw from then on, and warns where it cannot.
    """
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(local, parameter.device_mesh, parameter.placements, run_check=False)


def _fill_gradients(optimizer: Optimizer, step: int, drawn: _Drawn, random: torch.Generator) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, parameter in enumerate(parameters):
        # One has none in the first step, and none of its state until the second.
        last = step == 0 and index == len(parameters) - 1 and len(parameters) > 1
        parameter.grad = None
        if parameter.requires_grad and not (last and drawn.absent):
            local = local_of(parameter.detach())
            drawn_here = torch.randn(local.shape, dtype=local.dtype, generator=random).to(local.device)
            gradient = _like(drawn_here, parameter)
            if drawn.sparse and parameter.dim() == 2:
                gradient[1::2] = 0
                gradient = gradient.to_sparse(1)
            parameter.grad = gradient


@contextmanager
def _seeded(optimizer: Optimizer) -> Iterator[torch.Generator]:
    """Seed what ``optimizer`` draws, and yield a generator that no other thread draws from."""
    devices = {local_of(p).device for group in optimizer.param_groups for p in group["params"]}
    with torch.random.fork_rng([d for d in devices if d.type == "cuda"]):
        torch.manual_seed(0)
        yield torch.Generator().manual_seed(0)
