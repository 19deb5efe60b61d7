"""Converts the state of a module and its optimizers to nested tensors under plain names, and back."""

from collections.abc import Callable, Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from lightning_ups.optim import check_options
from lightning_ups.state.checkpoint.io.staging import holds_tensors, is_sequence

FOREIGN = "foreign"  # the state dict of an optimizer whose layout differs from torch's
_LIKE = "like"  # the places of sharded tensors in such a state dict, each with a parameter that has the same placements
_EMPTY = "empty"  # the places of its empty dicts, which a folder does not store

_FORMS = "forms"  # of state entries that are not sharded like their parameter
_TUPLES = "tuples"  # the places of tuples that contain tensors, which a folder stores as lists
_KEYS = "keys"  # the original keys of dicts that have other keys than strings, which a folder stores as strings


def parameter_names(module: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Return the names of the parameters in each group of ``optimizer``.

    Raises:
        ValueError: If a parameter does not belong to the module.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    groups = [[names.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]
    if any("" in group for group in groups):
        raise ValueError(
            f"{type(optimizer).__name__} holds parameters that {type(module).__name__} does not have."
            " A checkpoint stores optimizer state under the names of the parameters, and these have none."
            " Build the optimizer from the module's parameters, in configure_optimizers."
        )
    return groups


def named_state(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return the state of ``optimizer`` by parameter names; tensors are not copied.

    If an optimizer stores a plain tensor for its local part of a parameter, it becomes a DTensor here, so that another
    number of ranks can read it. A state dict with another layout than torch's is stored unchanged, under `FOREIGN`.
    """
    numbered = optimizer.state_dict()
    if has_own_layout(numbered):
        return _foreign_state(module, numbered)
    groups = parameter_names(module, optimizer)
    flat = [name for group in groups for name in group]
    parameters = dict(module.named_parameters())
    forms: dict[str, str] = {}
    state: dict[str, dict[str, Any]] = {}
    for number, entries in numbered["state"].items():
        name = flat[number] if isinstance(number, int) else number
        state[name] = {key: _global(value, parameters[name], key, forms) for key, value in entries.items()}
    param_groups = [{**group, "params": names} for group, names in zip(numbered["param_groups"], groups, strict=True)]
    tree = {"state": state, "param_groups": param_groups}
    apart = {_FORMS: forms, _TUPLES: _tuples(tree), _KEYS: _keys(tree)}
    return tree | {name: found for name, found in apart.items() if found}


def has_own_layout(state: Any) -> bool:
    """Return whether ``state``, of an optimizer, has another layout than `torch.optim.Optimizer.state_dict`.

    Optimizers that wrap others often return the state dicts of these, under their own keys.
    """
    if not isinstance(state, Mapping) or state.keys() != {"state", "param_groups"}:
        return True
    return not all(isinstance(entries, Mapping) for entries in state["state"].values())


def _foreign_state(module: nn.Module, state: Any) -> dict[str, Any]:
    sharded = {name: p for name, p in module.named_parameters() if isinstance(p, DTensor)}
    like: list[list[Any]] = []
    empty: list[list[str]] = []

    def noted(leaf: Any, place: tuple[str, ...]) -> Any:
        if isinstance(leaf, DTensor):
            like.append([[*place], _sharded_alike(leaf, sharded)])
        elif isinstance(leaf, Mapping):
            empty.append([*place])
        return leaf.to_dense() if isinstance(leaf, Tensor) and leaf.is_sparse else leaf

    tree = {FOREIGN: map_leaves(state, noted, (FOREIGN,))}
    apart = {_LIKE: like, _EMPTY: empty, _TUPLES: _tuples(tree), _KEYS: _keys(tree)}
    return tree | {name: found for name, found in apart.items() if found}


def map_leaves(value: Any, change: Callable[[Any, tuple[str, ...]], Any], place: tuple[str, ...]) -> Any:
    """Return ``value`` with ``change(leaf, place)`` for each leaf: anything but mappings and sequences of tensors."""
    if isinstance(value, Mapping) and value:
        return {key: map_leaves(inner, change, (*place, str(key))) for key, inner in value.items()}
    if is_sequence(value) and holds_tensors(value):
        kind: Any = type(value)
        return kind(map_leaves(inner, change, (*place, str(i))) for i, inner in enumerate(value))
    return change(value, place)


def _sharded_alike(value: DTensor, parameters: Mapping[str, DTensor]) -> str:
    """Return the name of a parameter placed like ``value`` or, if there is none, of any on the same devices."""
    here = {name: p for name, p in parameters.items() if p.device_mesh == value.device_mesh}
    equal = (name for name, p in here.items() if p.shape == value.shape and p.placements == value.placements)
    return next(equal, None) or next((name for name, p in here.items() if p.shape != value.shape), next(iter(here)))


def places_alike(saved: Mapping[str, Any]) -> dict[tuple[str, ...], str]:
    """Map the place of each sharded tensor in a state dict under `FOREIGN` to a parameter with its placements."""
    return {tuple(place): name for place, name in saved.get(_LIKE, ())}


def _global(value: Any, parameter: Tensor, key: str, forms: dict[str, str]) -> Any:
    if is_sequence(value):  # such as LBFGS's earlier directions
        return type(value)(_global(inner, parameter, key, forms) for inner in value)
    if isinstance(value, Tensor) and value.is_sparse:
        return value.to_dense()  # files have no sparse tensors, and an optimizer can continue with a dense one
    if not isinstance(parameter, DTensor) or not isinstance(value, Tensor) or isinstance(value, DTensor):
        return value
    if value.dim() == 0:
        return value
    local = parameter.to_local()
    if value.shape == local.shape and local.shape != parameter.shape:
        forms[key] = "local"
        return DTensor.from_local(
            value.detach().to(local.device),
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    forms.setdefault(key, "local" if value.shape == parameter.shape else "plain")
    return value


def _tuples(value: Any, *place: str | int) -> list[list[str | int]]:
    here = [[*place]] if isinstance(value, tuple) and holds_tensors(value) else []
    return here + [found for key, inner in _items(value) for found in _tuples(inner, *place, key)]


def _keys(value: Any, *place: str | int) -> list[list[Any]]:
    odd = isinstance(value, Mapping) and not all(isinstance(key, str) for key in value)
    here = [[[*place], [*value]]] if odd else []
    return here + [found for key, inner in _items(value) for found in _keys(inner, *place, key)]


def _items(value: Any) -> list[tuple[str | int, Any]]:
    if isinstance(value, Mapping):
        return [(str(key), inner) for key, inner in value.items()]
    return [*enumerate(value)] if holds_tensors(value) else []


def as_kept(tree: dict[str, Any]) -> dict[str, Any]:
    """Return ``tree``, a state read from a folder, with the tuples and dict keys that `named_state` recorded."""
    for *path, last in tree.get(_EMPTY, ()):
        inner: Any = tree
        for key in path:
            inner = inner[int(key)] if isinstance(inner, list) else inner.setdefault(key, {})
        if isinstance(inner, list):
            inner.insert(int(last), {})
        else:
            inner[last] = {}
    tuples = {tuple(place) for place in tree.get(_TUPLES, ())}
    keys = {tuple(place): {str(key): key for key in names} for place, names in tree.get(_KEYS, ())}
    return _with(tree, tuples, keys) if tuples or keys else tree


def _with(
    value: Any,
    tuples: Set[tuple[str | int, ...]],
    keys: Mapping[tuple[str | int, ...], Mapping[str, Any]],
    *place: str | int,
) -> Any:
    if isinstance(value, Mapping):
        names = keys.get(place, {})
        return {names.get(str(k), k): _with(inner, tuples, keys, *place, str(k)) for k, inner in value.items()}
    if isinstance(value, list):
        items = (_with(inner, tuples, keys, *place, index) for index, inner in enumerate(value))
        return tuple(items) if place in tuples else [*items]
    return value


def empty_like_parameter(parameter: Tensor, *, key: str, size: torch.Size, dtype: torch.dtype, form: str) -> Tensor:
    """Return a buffer for an entry of optimizer state, placed as the optimizer keeps it for ``parameter``."""
    if key == "step" or not size:
        return torch.empty(size, dtype=dtype)
    if not isinstance(parameter, DTensor) or form == "plain":
        return torch.empty(size, dtype=dtype, device=parameter.device)
    if size == parameter.shape:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    mesh = parameter.device_mesh
    whole = torch.empty(size, dtype=dtype, device=parameter.to_local().device)
    return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)


def check_groups(module: nn.Module, optimizer: Optimizer, saved: Mapping[str, Any]) -> list[list[str]]:
    """Return the names in each group of ``optimizer``, which must equal those of ``saved``.

    Raises:
        ValueError: If they differ.
    """
    groups = parameter_names(module, optimizer)
    saved_groups = [list(group["params"]) for group in saved["param_groups"]]
    if groups != saved_groups:
        raise ValueError(_other_groups(optimizer, groups, saved_groups))
    return groups


def restore(module: nn.Module, optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Load a state that `named_state` returned, possibly in another run, into ``optimizer``.

    Raises:
        ValueError: If the groups have other parameters, or belong to another optimizer.
    """
    if FOREIGN in saved:
        optimizer.load_state_dict(as_kept(saved)[FOREIGN])
        return
    groups = check_groups(module, optimizer, saved)
    check_options(optimizer, saved["param_groups"])
    numbers = {name: number for number, name in enumerate(name for group in groups for name in group)}
    saved, forms = as_kept(saved), saved.get(_FORMS, {})
    state = {
        numbers[name]: {key: _as_kept(value, forms.get(key)) for key, value in entries.items()}
        for name, entries in saved["state"].items()
    }
    param_groups = [
        {**group, "params": [numbers[name] for name in names]}
        for group, names in zip(saved["param_groups"], groups, strict=True)
    ]
    optimizer.load_state_dict({"state": state, "param_groups": param_groups})


def restore_numbered(names: list[list[str]], numbered: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``numbered``, the state dict of an optimizer on one device, by ``names``.

    Raises:
        ValueError: If the groups have other numbers of parameters.
    """
    saved_groups = [group["params"] for group in numbered["param_groups"]]
    if [len(group) for group in saved_groups] != [len(group) for group in names]:
        raise ValueError(
            f"The checkpoint's optimizer has groups of {[len(group) for group in saved_groups]} parameters, and this"
            f" one has groups of {[len(group) for group in names]}."
            " A checkpoint of one device numbers the parameters, so the groups must be the same."
            " Build the optimizer as it was built then."
        )
    name_of = {
        n: name for ns, group in zip(saved_groups, names, strict=True) for n, name in zip(ns, group, strict=True)
    }
    return {
        "state": {name_of[number]: entries for number, entries in numbered["state"].items()},
        "param_groups": [
            {**group, "params": group_names} for group, group_names in zip(numbered["param_groups"], names, strict=True)
        ],
    }


def _as_kept(value: Any, form: str | None) -> Any:
    if is_sequence(value):
        return type(value)(_as_kept(inner, form) for inner in value)
    return value.to_local() if form == "local" and isinstance(value, DTensor) else value


def _other_groups(optimizer: Optimizer, groups: list[list[str]], saved: list[list[str]]) -> str:
    here, there = {n for g in groups for n in g}, {n for g in saved for n in g}
    if here == there:
        difference = "the same parameters in other groups or in another order"
    else:
        parts = [(sorted(there - here), "only in the checkpoint"), (sorted(here - there), "only here")]
        difference = "; ".join(f"{', '.join(names[:5])} {where}" for names, where in parts if names)
    return (
        f"The groups of {type(optimizer).__name__} are not those of the checkpoint: {difference}."
        " The state of a parameter and the options of its group belong together."
        " Build the optimizer as it was built when the checkpoint was saved, or begin with its weights alone: leave out"
        " ckpt_path, and call lightning_ups.state.checkpoint.load_weights in on_fit_start."
    )
