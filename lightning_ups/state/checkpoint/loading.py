"""Reads a checkpoint into a module and its optimizers, from any writer and any number of ranks."""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import StorageReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_ups.state.checkpoint import folder, meta
from lightning_ups.state.checkpoint.io.reading import FolderReader, SlicedReader, mapped_safetensors, read_into
from lightning_ups.state.checkpoint.io.staging import is_sequence
from lightning_ups.state.checkpoint.stages import names_of_all_stages, without
from lightning_ups.state.checkpoint.state import (
    FOREIGN,
    check_groups,
    empty_like_parameter,
    has_own_layout,
    map_leaves,
    parameter_names,
    places_alike,
    restore,
    restore_numbered,
)
from lightning_ups.transforms.pipeline import absent_state

APART = "apart.pt"  # hyperparameters: not needed to resume, and possibly of any class
EXTRA = "lightning_ups.extra_state"  # of modules, unless it is a tensor: DCP would split a dict into its entries
SHARDED = "lightning_ups.sharded"  # replaces, in the rest of the state, a DTensor that is stored with the tensors
PLACES = "lightning_ups.places"  # places of gathered DTensors in the rest of a single file


@dataclass(frozen=True, kw_only=True)
class _Reading:
    path: Path
    module: nn.Module
    optimizers: Sequence[Optimizer] = ()
    strict: bool = True
    weights_only: bool = True
    needless: Container[str] = ()
    group: dist.ProcessGroup | None = None


def resolve(path: Path) -> Path:
    """Return the complete checkpoint that ``path`` refers to.

    Raises:
        FileNotFoundError: If there is none.
    """
    found = folder.located(path)
    if found is not None:
        return found
    beside = folder.newest(path.parent)
    if path.is_dir() and not folder.holds_part(path):
        inside = folder.newest_within(path)
        cure = f"The newest whole one below it is {str(inside)!r}: give that." if inside else "There is none below it."
        raise FileNotFoundError(
            f"{path} is a folder, and no checkpoint. One of several files has its marker, {folder.MARKER}, beside them,"
            f" and one of a single file ends in .ckpt. {cure}"
        )
    none = "There is no complete checkpoint beside it" + (
        "; what is left of this one can be deleted." if path.exists() else "."
    )
    cure = f"Use {str(beside)!r}, the newest whole one beside it." if beside else none
    if not path.exists():
        raise FileNotFoundError(f"The checkpoint {path} does not exist. {cure}")
    raise FileNotFoundError(
        f"The checkpoint {path} is not whole: {folder.fault(path)}. The process that wrote it died, its disk was full,"
        f" or the file was changed. {cure}"
    )


def load(
    path: Path,
    *,
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    strict: bool = True,
    weights_only: bool = True,
    needless: Container[str] = (),
    group: dist.ProcessGroup | None = None,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Read the checkpoint at ``path`` into ``module`` and ``optimizers``, in place, and return the rest of it.

    Args:
        path: A folder of this package or of ModelParallelStrategy, a file of a stock strategy, or safetensors.
        module: The module, sharded or not; each rank reads only its part.
        optimizers: The optimizers; empty outside of fit.
        strict: Whether the module and the checkpoint must have the same names.
        weights_only: See `meta.loaded`.
        needless: Keys of the rest that may be left out if their classes are not trusted.
        group: A process group on the CPU.

    Returns:
        The rest, and what was left out of it.

    Raises:
        ValueError: If names, shapes or optimizer groups do not match, or if something is not trusted.
    """
    reading = _Reading(
        path=path,
        module=module,
        optimizers=optimizers,
        strict=strict,
        weights_only=weights_only,
        needless=needless,
        group=group,
    )
    if _is_safetensors(path):
        if optimizers:
            raise ValueError(_no_optimizer(path))
        _load_module(reading, SlicedReader(mapped_safetensors(path)))
        return {"state_dict": {}}, {}
    return _load_file(reading) if path.is_file() else _load_folder(reading)


def load_optimizers(
    path: Path,
    *,
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    weights_only: bool = True,
    needless: Container[str] = (),
    group: dist.ProcessGroup | None = None,
) -> None:
    """Read only the states of ``optimizers`` from the checkpoint at ``path``; see `load`."""
    reading = _Reading(
        path=path,
        module=module,
        optimizers=optimizers,
        weights_only=weights_only,
        needless=needless,
        group=group,
    )
    if path.is_file():
        if _is_safetensors(path):
            raise ValueError(_no_optimizer(path))
        saved, _ = _content(path, weights_only=weights_only, needless=needless)
        with meta.damage_told(path):
            _restore_from_file(reading, saved.get("optimizer_states", []))
        return
    reader = FolderReader(path)
    with meta.damage_told(path):
        _restore_from_folder(reading, reader, reader.read_metadata())


def load_weights(
    module: nn.Module, path: str | Path, *, strict: bool = True, group: dist.ProcessGroup | None = None
) -> None:
    """Read the weights at ``path`` into ``module``, in place; each rank reads only its part.

    Args:
        module: The module, sharded or not, and not on the meta device.
        path: Safetensors (a file, or a folder with or without an index), a checkpoint folder, or a file of
            ``torch.save`` with a state dict or a Lightning checkpoint.
        strict: Whether the module and the file must have the same names.
        group: A process group on the CPU; without one, every rank reads independently.

    Raises:
        ValueError: If names or shapes do not match.
    """
    path = Path(path)
    if not path.is_file() and not _is_safetensors(path):
        path = resolve(path)
    reading = _Reading(path=path, module=module, strict=strict, group=group)
    if _is_safetensors(path):
        _load_module(reading, SlicedReader(mapped_safetensors(path)))
    elif path.is_file():
        saved, _ = _content(path, weights_only=True, needless=meta.Everything())
        _load_module_from(reading, meta.weights(path, saved))
    else:
        rest = dict[str, Any]()
        if (path / folder.META).exists():
            rest, _ = _content(path / folder.META, weights_only=True, needless=meta.Everything())
        _load_module(reading, FolderReader(path), prefix="state_dict.", others=rest.get(EXTRA, {}))


def _content(path: Path, *, weights_only: bool, needless: Container[str]) -> tuple[dict[str, Any], dict[str, str]]:
    meta.check_is_file(path)
    folder.verify(path)
    return meta.loaded(path, weights_only=weights_only, needless=needless, mmap=True)


def rest_of_folder(
    path: Path, *, weights_only: bool, needless: Container[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return what the checkpoint folder at ``path`` holds besides tensors, and what was left out; see `load`."""
    rest, left = _content(path / folder.META, weights_only=weights_only, needless=needless)
    if not (path / APART).exists():
        return rest, left
    folder.verify(path / APART)
    try:
        apart, left_apart = _content(path / APART, weights_only=weights_only, needless=meta.Everything())
    except ValueError as error:  # in a form that cannot be read safely
        return rest, {**left, "hyper_parameters": str(error).partition(". ")[0]}
    return {**rest, **apart}, {**left, **left_apart}


def _load_folder(reading: _Reading) -> tuple[dict[str, Any], dict[str, str]]:
    reader = FolderReader(reading.path)
    metadata = reader.read_metadata()
    rest, left = rest_of_folder(reading.path, weights_only=reading.weights_only, needless=reading.needless)
    _load_module(reading, reader, prefix="state_dict.", others=rest.pop(EXTRA, {}))
    with meta.damage_told(reading.path):
        _restore_from_folder(reading, reader, metadata)
        return _lowered(reading, rest, reader, metadata), left


def _load_file(reading: _Reading) -> tuple[dict[str, Any], dict[str, str]]:
    saved, left = _content(reading.path, weights_only=reading.weights_only, needless=reading.needless)
    meta.check_saved(reading.path, saved)
    _load_module_from(reading, saved.pop("state_dict"))
    states, places = saved.pop("optimizer_states", []), saved.pop(PLACES, None)
    with meta.damage_told(reading.path):
        _restore_from_file(reading, states)
        return _divided(reading, saved, places), left


def _restore_from_folder(reading: _Reading, reader: StorageReader, metadata: Metadata) -> None:
    for index, optimizer in enumerate(reading.optimizers):
        saved = _read_optimizer(reading, optimizer, reader, metadata, key=f"optimizer_{index}")
        restore(reading.module, optimizer, saved)


def _restore_from_file(reading: _Reading, states: Sequence[Any]) -> None:
    if len(states) < len(reading.optimizers):
        raise ValueError(_no_optimizer(reading.path))
    for optimizer, numbered in zip(reading.optimizers, states, strict=False):
        if has_own_layout(numbered):
            tree = _sharded_by_shape(reading, numbered)
        else:
            names = names_of_all_stages(reading.module, parameter_names(reading.module, optimizer), reading.group)
            tree = without(restore_numbered(names, numbered), absent_state(reading.module))
            tree = _laid_out(reading, tree)
        restore(reading.module, optimizer, tree)


def _sharded_by_shape(reading: _Reading, state: Any) -> dict[str, Any]:
    """Return the state dict of a single-device optimizer with its own layout, with tensors sharded as here.

    Only its shape tells which parameter a tensor belongs to.
    """
    shapes = {p.shape: p for p in reading.module.parameters() if isinstance(p, DTensor)}
    sources: dict[str, Any] = {}
    targets: dict[str, Any] = {}

    def with_room(leaf: Any, place: tuple[str, ...]) -> Any:
        if not isinstance(leaf, Tensor) or leaf.shape not in shapes:
            return leaf
        return _room_for(leaf, ".".join(place), sources, targets, like=shapes[leaf.shape], key="")

    tree = {FOREIGN: map_leaves(state, with_room, (FOREIGN,))}
    read_into(targets, SlicedReader(sources), group=reading.group, weights_only=reading.weights_only)
    return tree


def _load_module_from(reading: _Reading, saved: Mapping[str, Any]) -> None:
    if not isinstance(saved, Mapping) or not all(isinstance(name, str) for name in saved):
        raise ValueError(meta.damage(reading.path, ValueError("its weights have no names")))
    tensors = {name: value for name, value in saved.items() if isinstance(value, Tensor)}
    others = {name: value for name, value in saved.items() if not isinstance(value, Tensor)}
    _load_module(reading, SlicedReader(tensors), others=others)


def _load_module(
    reading: _Reading, reader: StorageReader, *, prefix: str = "", others: Mapping[str, Any] | None = None
) -> None:
    module, others = reading.module, others or {}
    if not isinstance(others, Mapping):
        raise ValueError(meta.damage(reading.path, ValueError("the state of its modules has no names")))
    described = reader.read_metadata().state_dict_metadata
    there = {name.removeprefix(prefix): entry for name, entry in described.items() if name.startswith(prefix)}
    here = module.state_dict()
    if reading.strict:
        _check_names(reading, here.keys(), (there.keys() | others.keys()) - absent_state(module))
    targets = {name: value for name, value in here.items() if name in there}
    for name, value in targets.items():
        entry = there[name]
        if isinstance(value, Tensor) and isinstance(entry, TensorStorageMetadata) and entry.size != value.shape:
            raise ValueError(
                f"{name} has the shape {tuple(entry.size)} in {reading.path}, and {tuple(value.shape)} in"
                f" {type(module).__name__}."
                " Weights of another shape are those of another model."
                " Build the model as it was built when the checkpoint was saved."
            )
    flat = {prefix + name: value for name, value in targets.items()}
    read_into(flat, reader, group=reading.group, weights_only=reading.weights_only)
    read = {name: flat[prefix + name] for name in targets}
    # the weights are already in place; this calls the module's own hooks
    module.load_state_dict({**read, **others}, strict=False)


def _check_names(reading: _Reading, here: Set[str], there: Set[str]) -> None:
    parts = [(sorted(here - there), "are missing"), (sorted(there - here), "are unknown to the module")]
    if difference := "; ".join(f"{', '.join(names[:5])} {what}" for names, what in parts if names):
        in_fit = (
            ", if no optimizer steps what differs. Otherwise begin with the weights that both have: leave out"
            " ckpt_path, and call lightning_ups.state.checkpoint.load_weights with strict=False in on_fit_start"
        )
        if next(reading.module.parameters(), None) is None:
            raise ValueError(
                f"{type(reading.module).__name__} has no weights yet, which those in {reading.path} could replace."
                " Call its configure_model() first."
            )
        raise ValueError(
            f"The names in {reading.path} are not those of {type(reading.module).__name__}: {difference}."
            " A weight under another name would be left as it was, or be lost."
            " Load it into the model that it was saved from, or set strict_loading = False on the LightningModule"
            f"{in_fit if reading.optimizers else ''}."
        )


def _read_optimizer(
    reading: _Reading, optimizer: Optimizer, reader: StorageReader, metadata: Metadata, *, key: str
) -> dict[str, Any]:
    paths = {name: place for name, place in (metadata.planner_data or {}).items() if place[0] == key}
    if not paths:
        raise ValueError(_no_optimizer(reading.path))
    described = metadata.state_dict_metadata
    values: dict[str, Any] = {name: None for name in paths if isinstance(described[name], BytesStorageMetadata)}
    read_into(values, reader, group=reading.group, weights_only=reading.weights_only)
    saved = nested({paths[name][1:]: value for name, value in values.items()})
    is_foreign = any(place[1] == FOREIGN for place in paths.values())
    absent = absent_state(reading.module)
    if not is_foreign:
        saved = without(saved, absent)
        check_groups(reading.module, optimizer, saved)
    parameters, forms = dict(reading.module.named_parameters()), saved.get("forms", {})
    alike = places_alike(saved)
    tensors: dict[str, Any] = {}
    for name, entry in described.items():
        if name not in paths or not isinstance(entry, TensorStorageMetadata):
            continue
        dtype, place = entry.properties.dtype, paths[name]
        if place[1] == "state" and place[2] in absent:
            continue
        if place[1] == "state":
            form = forms.get(place[3], "")
            tensors[name] = empty_like_parameter(
                parameters[place[2]], key=place[3], size=entry.size, dtype=dtype, form=form
            )
        elif (like := alike.get(tuple(map(str, place[1:])))) is not None:
            tensors[name] = empty_like_parameter(parameters[like], key="", size=entry.size, dtype=dtype, form="")
        else:
            tensors[name] = torch.empty(entry.size, dtype=dtype)
    read_into(tensors, reader, group=reading.group, weights_only=reading.weights_only)
    tree = nested({paths[name][1:]: value for name, value in {**values, **tensors}.items()})
    return tree if is_foreign else without({"state": {}, **tree}, absent)


def _laid_out(reading: _Reading, tree: dict[str, Any]) -> dict[str, Any]:
    parameters = dict(reading.module.named_parameters())
    sources: dict[str, Any] = {}
    targets: dict[str, Any] = {}
    state = {
        name: {
            key: _room_for(value, f"{name}.{key}", sources, targets, like=parameters[name], key=key)
            for key, value in entries.items()
        }
        for name, entries in tree["state"].items()
    }
    read_into(targets, SlicedReader(sources), group=reading.group, weights_only=reading.weights_only)
    return {**tree, "state": state}


def _room_for(
    value: Any, place: str, sources: dict[str, Any], targets: dict[str, Any], *, like: Tensor, key: str
) -> Any:
    """Return a buffer for ``value``, to be read from ``sources`` into ``targets``; if it is no tensor, ``value``."""
    if is_sequence(value):
        items = enumerate(value)
        return type(value)(_room_for(v, f"{place}.{i}", sources, targets, like=like, key=key) for i, v in items)
    if not isinstance(value, Tensor):
        return value
    sources[place] = value
    targets[place] = empty_like_parameter(like, key=key, size=value.shape, dtype=value.dtype, form="")
    return targets[place]


def _lowered(reading: _Reading, rest: dict[str, Any], reader: StorageReader, metadata: Metadata) -> dict[str, Any]:
    entries = {
        name: (entry.size, entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if name.startswith(SHARDED + ".") and isinstance(entry, TensorStorageMetadata)
    }
    if not entries:
        return rest
    parameters = dict(reading.module.named_parameters(remove_duplicate=False))
    return put_back(rest, _read_into_rooms(reading, entries, reader, parameters))


def _divided(reading: _Reading, rest: dict[str, Any], places: Iterable[str] | None) -> dict[str, Any]:
    """Shard tensors that a file has unsharded, such as averaged weights, like the parameter of their name.

    Args:
        reading: The current read.
        rest: The rest of the file.
        places: Which tensors were sharded when the file was saved. None: unknown; decided by a parameter's name and
            shape.
    """
    parameters = {
        name: p for name, p in reading.module.named_parameters(remove_duplicate=False) if isinstance(p, DTensor)
    }
    named, were_sharded = _by_names(parameters), {*(places or ())}

    def is_shard(place: str, value: Any) -> bool:
        if not isinstance(value, Tensor):
            return False
        return place in were_sharded if places is not None else _namesake(named, place, value.shape) is not None

    rest, sources = _without(rest, is_shard)
    entries = {place: (value.shape, value.dtype) for place, value in sources.items()}
    targets = _read_into_rooms(reading, entries, SlicedReader(sources), parameters)
    return put_back(rest, {f"{SHARDED}.{place}": target for place, target in targets.items()})


def _read_into_rooms(
    reading: _Reading,
    entries: Mapping[str, tuple[torch.Size, torch.dtype]],
    reader: StorageReader,
    parameters: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Read sharded tensors, each placed like the parameter of its name, or else like those of its size."""
    named, targets = _by_names(parameters), dict[str, Tensor]()
    for place, (size, dtype) in entries.items():
        like = _namesake(named, place, size)
        like = _shard_of_size(parameters.values(), size) if like is None else like
        targets[place] = (
            torch.empty(size, dtype=dtype) if like is None else torch.empty_like(like, dtype=dtype, requires_grad=False)
        )
    read_into(targets, reader, group=reading.group, weights_only=reading.weights_only)
    return targets


def _by_names(parameters: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
    """Return ``parameters`` by full names and by name suffixes with two or more parts."""
    named = {name: [p] for name, p in parameters.items()}
    for name, p in parameters.items():
        parts = name.split(".")
        for start in range(1, len(parts) - 1):
            named.setdefault(".".join(parts[start:]), []).append(p)
    return named


def _namesake(named: Mapping[str, Sequence[Tensor]], place: str, size: torch.Size) -> Tensor | None:
    """Return the parameter whose name is a suffix of ``place``, a place in a checkpoint, if it has this size."""
    _, *parts = place.split(".")
    names = (".".join(parts[start:]) for start in range(len(parts)))  # the longest first
    return next((p for name in names for p in named.get(name, ()) if p.shape == size), None)


def _shard_of_size(parameters: Iterable[Tensor], size: torch.Size) -> Tensor | None:
    """Return a sharded parameter of that size, if all of them have the same placements."""
    shards = [p for p in parameters if isinstance(p, DTensor) and p.shape == size]
    layouts = {(p.device_mesh, p.placements) for p in shards}
    return shards[0] if len(layouts) == 1 else None


def put_back(value: Any, tensors: Mapping[str, Any]) -> Any:
    """Return ``value`` with the tensors that `lifted` took from it, found in ``tensors`` by name."""
    if isinstance(value, dict):
        if set(value) == {SHARDED}:
            return tensors[f"{SHARDED}.{value[SHARDED]}"]
        new = {key: put_back(inner, tensors) for key, inner in value.items()}
        return new if any(new[key] is not value[key] for key in new) else value
    if type(value) in (list, tuple):
        items = [put_back(inner, tensors) for inner in value]
        return type(value)(items) if any(a is not b for a, b in zip(items, value, strict=True)) else value
    return value


def lifted(rest: dict[str, Any], *, also: Iterable[Tensor] = ()) -> tuple[dict[str, Any], dict[str, Any]]:
    """Separate the DTensors from ``rest``, such as averaged weights of a callback; `load` restores them.

    Args:
        rest: A nested dict.
        also: Tensors in it that are separated, too.
    """
    others = {*map(id, also)}
    return _without(rest, lambda _, value: isinstance(value, DTensor) or id(value) in others)


def _without(rest: dict[str, Any], taken: Callable[[str, Any], bool]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Separate values for which ``taken(place, value)`` holds; return the rest, and the separated values by place."""
    found: dict[str, Any] = {}
    return _take(rest, "", taken, found), found


def _take(value: Any, place: str, taken: Callable[[str, Any], bool], found: dict[str, Any]) -> Any:
    if taken(place, value):
        found[place] = value
        return {SHARDED: place}
    if isinstance(value, dict):
        new = {key: _take(inner, f"{place}.{key}" if place else str(key), taken, found) for key, inner in value.items()}
        return new if any(new[key] is not value[key] for key in new) else value
    if type(value) in (list, tuple):
        items = [_take(inner, f"{place}.{index}", taken, found) for index, inner in enumerate(value)]
        return type(value)(items) if any(a is not b for a, b in zip(items, value, strict=True)) else value
    return value


def nested(flat: Mapping[tuple[Any, ...], Any]) -> dict[str, Any]:
    """Return ``flat``, whose keys are paths, as a nested dict; numbers in a path are list indices."""
    tree: dict[Any, Any] = {}
    for path, value in flat.items():
        node = tree
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = value
    return _with_lists(tree)


def _with_lists(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    if tree and all(isinstance(key, int) for key in tree):
        return [_with_lists(tree[key]) for key in sorted(tree)]
    return {key: _with_lists(value) for key, value in tree.items()}


def _is_safetensors(path: Path) -> bool:
    if path.is_file():
        return path.suffix == ".safetensors"
    return path.is_dir() and not (path / ".metadata").exists() and any(path.glob("*.safetensors"))


def _no_optimizer(path: Path) -> str:
    return (
        f"{path} holds no optimizer state for every optimizer of this run."
        " It was saved with save_weights_only=True, or by a run with fewer optimizers, and fit resumes all of them."
        " Start from its weights alone by load_weights in on_fit_start, or name a full checkpoint."
    )
