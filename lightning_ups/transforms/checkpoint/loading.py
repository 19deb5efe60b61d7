"""Reading a checkpoint into a module and its optimizers, whoever wrote it and on however many ranks."""

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import StorageReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_ups.transforms.checkpoint import folder, meta
from lightning_ups.transforms.checkpoint.reading import FolderReader, SlicedReader, read_into, safetensors_slices
from lightning_ups.transforms.checkpoint.state import (
    check_groups,
    empty_like_parameter,
    parameter_names,
    restore,
    restore_numbered,
)

__all__ = ["APART", "SHARDED", "load", "load_weights", "resolve"]

APART = "apart.pt"  # hyperparameters: resuming does not need them, and they may be of any class
SHARDED = "lightning_ups.sharded"  # stands, in the rest of the state, for a DTensor that lies with the tensors
Path_ = tuple[Any, ...]


def resolve(path: Path) -> Path:
    """Return the whole checkpoint that ``path`` means.

    Raises:
        FileNotFoundError: If there is none.
    """
    found = folder.located(path)
    if found is not None:
        return found
    beside = folder.newest(path.parent)
    what = "is not whole: the process that wrote it died, or its disk was full" if path.exists() else "does not exist"
    why = "A folder counts as a checkpoint once it holds its marker, which is written last."
    cure = f"Use {str(beside)!r}, the newest whole one beside it." if beside else "No whole one is beside it."
    raise FileNotFoundError(f"The checkpoint {path} {what}. {why} {cure}")


def load(
    path: Path,
    *,
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    strict: bool = True,
    weights_only: bool = True,
    needless: Sequence[str] = (),
    group: dist.ProcessGroup | None = None,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Read the checkpoint at ``path`` into ``module`` and ``optimizers``, in place, and return the rest of it.

    Args:
        path: A folder of ours or of ModelParallelStrategy, a file of a stock strategy, or safetensors.
        module: Sharded or not; each rank reads its part only.
        optimizers: Empty outside fit.
        strict: Whether the module and the checkpoint must have the same names.
        weights_only: See `meta.loaded`.
        needless: Keys of the rest that may stay behind if their classes are not trusted.
        group: A process group on the CPU.

    Returns:
        The rest, and what stayed behind of it.

    Raises:
        ValueError: If names, shapes or optimizer groups do not match, or something is not trusted.
    """
    if _is_safetensors(path):
        load_weights(module, path, strict=strict, group=group)
        return {"state_dict": {}}, {}
    if path.is_file():
        return _load_file(path, module, optimizers, strict, weights_only, needless, group)
    return _load_folder(path, module, optimizers, strict, weights_only, needless, group)


def load_weights(
    module: nn.Module, path: str | Path, *, strict: bool = True, group: dist.ProcessGroup | None = None
) -> None:
    """Read the weights at ``path`` into ``module``, in place; each rank reads its part only.

    Args:
        module: Sharded or not, and not on the meta device.
        path: Safetensors (a file, or a folder with or without an index), a checkpoint folder, or a file of
            ``torch.save`` with a state dict or a Lightning checkpoint.
        strict: Whether the module and the file must have the same names.
        group: A process group on the CPU; without one, every rank reads by itself.

    Raises:
        ValueError: If names or shapes do not match.
    """
    path = Path(path)
    if _is_safetensors(path):
        _load_module(module, SlicedReader(safetensors_slices(path)), "", strict, path, group)
    elif path.is_file():
        saved, _ = meta.loaded(path, mmap=_can_map(path), needless=_Everything())
        _load_module_from(module, saved.get("state_dict", saved), strict, path, group)
    else:
        _load_module(module, FolderReader(resolve(path)), "state_dict.", strict, path, group)


class _Everything(tuple[str, ...]):
    def __contains__(self, key: object) -> bool:
        return True


def _load_folder(
    path: Path,
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    strict: bool,  # noqa: FBT001
    weights_only: bool,  # noqa: FBT001
    needless: Sequence[str],
    group: dist.ProcessGroup | None,
) -> tuple[dict[str, Any], dict[str, str]]:
    reader = FolderReader(path)
    metadata = reader.read_metadata()
    rest, left = meta.loaded(path / folder.META, weights_only=weights_only, needless=needless)
    if (path / APART).exists():
        try:
            apart, left_apart = meta.loaded(path / APART, weights_only=weights_only, needless=_Everything())
        except (ValueError, pickle.UnpicklingError) as error:
            apart, left_apart = {}, {"hyperparameters": str(error).partition(". ")[0]}
        rest, left = {**rest, **apart}, {**left, **left_apart}
    _load_module(module, reader, "state_dict.", strict, path, group)
    for index, optimizer in enumerate(optimizers):
        saved = _read_optimizer(f"optimizer_{index}", module, optimizer, reader, metadata, path, group)
        restore(module, optimizer, saved)
    return _lowered(rest, module, reader, metadata, group), left


def _load_file(
    path: Path,
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    strict: bool,  # noqa: FBT001
    weights_only: bool,  # noqa: FBT001
    needless: Sequence[str],
    group: dist.ProcessGroup | None,
) -> tuple[dict[str, Any], dict[str, str]]:
    saved, left = meta.loaded(path, weights_only=weights_only, needless=needless, mmap=_can_map(path))
    _load_module_from(module, saved.pop("state_dict"), strict, path, group)
    states = saved.pop("optimizer_states", [])
    if len(states) < len(optimizers):
        raise ValueError(_no_optimizer(path))
    for optimizer, numbered in zip(optimizers, states, strict=False):
        tree = restore_numbered(parameter_names(module, optimizer), numbered)
        restore(module, optimizer, _sharded_like_parameters(tree, module, group))
    return saved, left


def _load_module_from(
    module: nn.Module,
    saved: Mapping[str, Any],
    strict: bool,  # noqa: FBT001
    path: Path,
    group: dist.ProcessGroup | None,
) -> None:
    tensors = {name: value for name, value in saved.items() if isinstance(value, Tensor)}
    others = {name: value for name, value in saved.items() if not isinstance(value, Tensor)}
    _load_module(module, SlicedReader(tensors), "", strict, path, group, others=others)


def _load_module(
    module: nn.Module,
    reader: StorageReader,
    prefix: str,
    strict: bool,  # noqa: FBT001
    path: Path,
    group: dist.ProcessGroup | None,
    *,
    others: Mapping[str, Any] | None = None,
) -> None:
    others = others or {}
    described = reader.read_metadata().state_dict_metadata
    there = {name.removeprefix(prefix): entry for name, entry in described.items() if name.startswith(prefix)}
    here = module.state_dict()
    if strict:
        _check_names(module, here.keys(), there.keys() | others.keys(), path)
    targets = {name: value for name, value in here.items() if name in there}
    for name, value in targets.items():
        entry = there[name]
        if isinstance(value, Tensor) and isinstance(entry, TensorStorageMetadata) and entry.size != value.shape:
            raise ValueError(
                f"{name} has the shape {tuple(entry.size)} in {path}, and {tuple(value.shape)} in"
                f" {type(module).__name__}."
                " Weights of another shape are those of another model."
                " Build the model as it was built when the checkpoint was saved."
            )
    flat = {prefix + name: value for name, value in targets.items()}
    read_into(flat, reader, group=group)
    read = {name: flat[prefix + name] for name in targets}
    module.load_state_dict({**read, **others}, strict=False)  # in place already; this is for the module's own hooks


def _check_names(module: nn.Module, here: Any, there: Any, path: Path) -> None:
    parts = [(sorted(here - there), "are missing"), (sorted(there - here), "are unknown to the module")]
    if difference := "; ".join(f"{', '.join(names[:5])} {what}" for names, what in parts if names):
        raise ValueError(
            f"The names in {path} are not those of {type(module).__name__}: {difference}."
            " A weight under another name would be left as it was, or be lost."
            " Load it into the model that it was saved from, or set strict_loading = False on the LightningModule."
        )


def _read_optimizer(
    key: str,
    module: nn.Module,
    optimizer: Optimizer,
    reader: StorageReader,
    metadata: Metadata,
    path: Path,
    group: dist.ProcessGroup | None,
) -> dict[str, Any]:
    paths = {name: path_ for name, path_ in (metadata.planner_data or {}).items() if path_[0] == key}
    if not paths:
        raise ValueError(_no_optimizer(path))
    described = metadata.state_dict_metadata
    values: dict[str, Any] = {name: None for name in paths if isinstance(described[name], BytesStorageMetadata)}
    read_into(values, reader, group=group)
    saved: dict[str, Any] = _nested({paths[name][1:]: value for name, value in values.items()})
    saved.setdefault("state", {})
    check_groups(module, optimizer, saved)
    parameters, forms = dict(module.named_parameters()), saved.get("forms", {})
    tensors: dict[str, Any] = {}
    for name, entry in described.items():
        if name not in paths or not isinstance(entry, TensorStorageMetadata):
            continue
        dtype, place = entry.properties.dtype, paths[name]
        if place[1] == "state":
            form = forms.get(place[3], "")
            tensors[name] = empty_like_parameter(
                parameters[place[2]], key=place[3], size=entry.size, dtype=dtype, form=form
            )
        else:
            tensors[name] = torch.empty(entry.size, dtype=dtype)
    read_into(tensors, reader, group=group)
    return _nested({paths[name][1:]: value for name, value in {**values, **tensors}.items()}, into=saved)


def _sharded_like_parameters(
    tree: dict[str, Any], module: nn.Module, group: dist.ProcessGroup | None
) -> dict[str, Any]:
    parameters = dict(module.named_parameters())
    sources: dict[str, Any] = {}
    targets: dict[str, Any] = {}
    for name, entries in tree["state"].items():
        for key, value in entries.items():
            if isinstance(value, Tensor):
                sources[f"{name}.{key}"] = value
                targets[f"{name}.{key}"] = empty_like_parameter(
                    parameters[name], key=key, size=value.shape, dtype=value.dtype, form=""
                )
    read_into(targets, SlicedReader(sources), group=group)
    state = {
        name: {key: targets.get(f"{name}.{key}", value) for key, value in entries.items()}
        for name, entries in tree["state"].items()
    }
    return {**tree, "state": state}


def _lowered(
    rest: dict[str, Any],
    module: nn.Module,
    reader: StorageReader,
    metadata: Metadata,
    group: dist.ProcessGroup | None,
) -> dict[str, Any]:
    entries = {
        name: entry
        for name, entry in metadata.state_dict_metadata.items()
        if name.startswith(SHARDED + ".") and isinstance(entry, TensorStorageMetadata)
    }
    if not entries:
        return rest
    parameters = dict(module.named_parameters())
    targets: dict[str, Any] = {}
    for name, entry in entries.items():
        like = next((p for n, p in parameters.items() if name.endswith("." + n) and p.shape == entry.size), None)
        if like is None:
            targets[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
        else:
            targets[name] = torch.empty_like(like, dtype=entry.properties.dtype, requires_grad=False)
    read_into(targets, reader, group=group)

    def put_back(value: Any) -> Any:
        if isinstance(value, dict):
            if set(value) == {SHARDED}:
                return targets[f"{SHARDED}.{value[SHARDED]}"]
            return {key: put_back(inner) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(put_back(inner) for inner in value)
        return value

    return put_back(rest)


def lifted(rest: dict[str, Any]) -> tuple[dict[str, Any], dict[str, DTensor]]:
    """Part the DTensors from ``rest``, such as averaged weights that a callback keeps; `load` puts them back."""
    found: dict[str, DTensor] = {}

    def take(value: Any, place: str) -> Any:
        if isinstance(value, DTensor):
            found[place] = value
            return {SHARDED: place}
        if isinstance(value, dict):
            return {key: take(inner, f"{place}.{key}" if place else str(key)) for key, inner in value.items()}
        if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
            return type(value)(take(inner, f"{place}.{index}") for index, inner in enumerate(value))
        return value

    return take(rest, ""), found


def _nested(flat: Mapping[Path_, Any], *, into: dict[str, Any] | None = None) -> dict[str, Any]:
    tree: Any = {} if into is None else into
    for path, value in sorted(flat.items(), key=lambda item: str(item[0])):
        node = tree
        for part, following in zip(path, path[1:], strict=False):
            node = _child(node, part, [] if isinstance(following, int) else {})
        if isinstance(node, list):
            _child(node, path[-1], value)
            node[path[-1]] = value
        else:
            node[path[-1]] = value
    return tree


def _child(node: Any, part: Any, default: Any) -> Any:
    if isinstance(node, list):
        while len(node) <= part:
            node.append(None)
        if node[part] is None:
            node[part] = default
        return node[part]
    return node.setdefault(part, default)


def _is_safetensors(path: Path) -> bool:
    if path.is_file():
        return path.suffix == ".safetensors"
    return path.is_dir() and not (path / ".metadata").exists() and any(path.glob("*.safetensors"))


def _can_map(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"  # files of torch before 1.6 are no zip archives


def _no_optimizer(path: Path) -> str:
    return (
        f"{path} holds no optimizer state for every optimizer of this run."
        " It was saved with save_weights_only=True, or by a run with fewer optimizers, and fit resumes all of them."
        " Start from its weights alone by load_weights in on_fit_start, or name a full checkpoint."
    )
