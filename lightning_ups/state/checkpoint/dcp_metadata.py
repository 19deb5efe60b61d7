"""Reads the metadata of a checkpoint folder without unpickling: nothing in it is imported or called.

Folders of this package store it as JSON, in the file `TENSORS`. Older and foreign ones only have DCP's `.metadata`, a
pickle: `_parsed` runs the opcodes that describe data and turns every class, call and object into an inert `_Record`.
`read_metadata` builds DCP's dataclasses from values of the expected types.
"""

import gc
import json
import math
import os
import pickletools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePath
from pickle import UnpicklingError
from typing import Any, TypeVar, cast

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from lightning_ups._compat.torch.tensors.tensor_files import noted
from lightning_ups.state.checkpoint import meta

TENSORS = "tensors.json"

_T = TypeVar("_T")
_DCP = "torch.distributed.checkpoint.metadata."
_FILES = "torch.distributed.checkpoint.filesystem."
_DTYPES = {f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_NAMES = {
    *(f"{_DCP}{kind.__name__}" for kind in (Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata)),
    *(f"{_DCP}{name}" for name in ("BytesStorageMetadata", "ChunkStorageMetadata")),
    *(f"{_DCP}{name}" for name in ("StorageMeta", "_MEM_FORMAT_ENCODING")),
    *(f"{_FILES}{name}" for name in ("_StorageInfo", "_StoragePrefix")),
    *("torch.Size", "torch.serialization._get_layout", "collections.OrderedDict"),
    *(f"{module}.{name}Path" for module in ("pathlib", "pathlib._local") for name in ("Posix", "Windows")),
    "builtins.getattr",  # of an enum, as Python 3.11.0 to 3.11.3 pickles it
    *_DTYPES,
}
_EMPTY = {"EMPTY_TUPLE": tuple, "EMPTY_DICT": dict, "EMPTY_LIST": list}
_CONSTANTS = {"NONE", "BININT", "BININT1", "BININT2", "LONG1", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"}


def read_metadata(path: Path) -> Metadata:
    """Return what the file at ``path``, `TENSORS` or ``.metadata``, says about tensors and where they are stored.

    Raises:
        ValueError: If the file is damaged, names anything that DCP does not write, or points outside of its folder.
        OSError: If it cannot be read.
    """
    meta.check_is_file(path)
    with _without_collections():
        try:
            found = _from_json(path) if path.name == TENSORS else _metadata(_parsed(path.read_bytes(), path))
            _check_files(found.storage_data.values(), path)
            _check_parts(found)
        except (_RefusedError, OSError):
            raise
        except Exception as error:  # any: a damaged file may hold anything
            raise ValueError(meta.damage(path, error)) from error
        return found


@contextmanager
def _without_collections() -> Iterator[None]:
    """Pause Python's garbage collector: it would scan a million new objects repeatedly, and free none."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def as_json(metadata: Metadata, stored: Mapping[MetadataIndex, Any]) -> bytes:
    """Return ``metadata``, and where its chunks are ``stored``, as the content of `TENSORS`."""

    def place(name: str, offsets: torch.Size | None = None) -> tuple[str, int, int]:
        found = stored[MetadataIndex(name, offsets)]
        return found.relative_path, found.offset, found.length

    entries = dict[str, Any]()
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            entries[name] = {"stored": place(name)}
        else:
            chunks = [(chunk.offsets, chunk.sizes, *place(name, chunk.offsets)) for chunk in entry.chunks]
            entries[name] = {"dtype": str(entry.properties.dtype), "size": entry.size, "chunks": chunks}
    return json.dumps({"entries": entries, "keys": metadata.planner_data}, separators=(",", ":")).encode()


def _from_json(path: Path) -> Metadata:
    tree = meta.read_json(path)
    entries, stored = dict[str, Any](), dict[MetadataIndex, Any]()
    for name, entry in tree["entries"].items():
        if "stored" in entry:
            entries[name] = BytesStorageMetadata()
            stored[MetadataIndex(name)] = _place(*entry["stored"])
            continue
        parts = list[ChunkStorageMetadata]()
        for offsets, sizes, *place in entry["chunks"]:
            part = ChunkStorageMetadata(_size(torch.Size(offsets)), _size(torch.Size(sizes)))
            parts.append(part)
            stored[MetadataIndex(name, part.offsets)] = _place(*place)
        entries[name] = _tensor(entry["dtype"], _size(torch.Size(entry["size"])), parts)
    return _joined(entries, tree["keys"], stored)


class _RefusedError(ValueError):
    pass


class _Record:
    """A class that the file names, or an object described by a class, arguments and a state."""

    __slots__ = ("args", "name", "state")

    def __init__(self, name: str, args: tuple[Any, ...] | None = None) -> None:
        self.name, self.args, self.state = name, args, None


def _parsed(data: bytes, path: Path) -> Any:
    """Run the opcodes of a pickle that describe data, and refuse all others."""
    stack: list[Any] = []
    below: list[list[Any]] = []  # the stacks under each mark
    memo: list[Any] = []  # picklers number what they store from 0
    for opcode, value, _ in cast("Iterable[tuple[Any, Any, Any]]", pickletools.genops(data)):
        name = opcode.name
        if name in _CONSTANTS:
            stack.append(value)
        elif name in ("NEWTRUE", "NEWFALSE"):
            stack.append(name == "NEWTRUE")
        elif name in ("MEMOIZE", "BINPUT", "LONG_BINPUT"):
            if value not in (None, len(memo)):
                raise UnpicklingError("it stores objects out of order")
            memo.append(stack[-1])
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[value])
        elif name == "MARK":
            below.append(stack)
            stack = []
        elif name in _EMPTY:
            stack.append(_EMPTY[name]())
        elif name in ("NEWOBJ", "REDUCE"):
            args = stack.pop()
            stack[-1] = _described(stack[-1], args)
        elif name == "BUILD":
            state, target = stack.pop(), stack[-1]
            if type(target) is not _Record or target.args is None or target.state is not None:
                raise UnpicklingError("it gives a state to what is no object of DCP")
            target.state = state
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            count = int(name[-1])
            stack[-count:] = [tuple(stack[-count:])]
        elif name in ("TUPLE", "SETITEMS", "APPENDS"):
            items, stack = stack, below.pop()
            if name == "TUPLE":
                stack.append(tuple(items))
            else:
                (_put if name == "SETITEMS" else _extend)(stack[-1], items)
        elif name == "SETITEM":
            last, key = stack.pop(), stack.pop()
            _put(stack[-1], [key, last])
        elif name == "APPEND":
            last = stack.pop()
            _extend(stack[-1], [last])
        elif name == "GLOBAL":
            stack.append(_named(*value.split(" ", 1), path=path))
        elif name == "STACK_GLOBAL":
            attribute = stack.pop()
            stack[-1] = _named(stack[-1], attribute, path=path)
        elif name == "STOP":
            return stack.pop()
        elif name not in ("PROTO", "FRAME"):
            raise UnpicklingError(f"the opcode {name} stands in it")
    raise UnpicklingError("its end is missing")


def _named(module: Any, attribute: Any, *, path: Path) -> _Record:
    if not (type(module) is str and type(attribute) is str and f"{module}.{attribute}" in _NAMES):
        raise _RefusedError(_foreign(path, f"{module}.{attribute}"))
    return _Record(f"{module}.{attribute}")


def _put(target: Any, pairs: list[Any]) -> None:
    keys = pairs[::2]
    # Hashing a deeply nested tuple would crash the process.
    if type(target) is not dict or not {*map(type, keys)} <= {str, _Record}:
        raise UnpicklingError("a mapping has a key that is no text")
    target.update(zip(keys, pairs[1::2], strict=True))


def _extend(target: Any, items: list[Any]) -> None:
    if type(target) is not list:
        raise UnpicklingError("it appends to what is not a list")
    target.extend(items)


def _described(kind: Any, args: Any) -> Any:
    if type(kind) is not _Record or kind.args is not None or type(args) is not tuple:
        raise UnpicklingError("it calls what is not a class of DCP")
    if kind.name == "torch.Size":
        return torch.Size(*args)
    if kind.name == "collections.OrderedDict" and not args:
        return {}
    return _Record(kind.name, args)


def _metadata(root: Any) -> Metadata:
    fields = _fields(root, "Metadata")
    entries = {name: _entry(value) for name, value in _is(fields["state_dict_metadata"], dict).items()}
    stored = {_index(key): _storage(value) for key, value in _is(fields.get("storage_data") or {}, dict).items()}
    return _joined(entries, fields.get("planner_data") or {}, stored)


def _joined(entries: dict[str, Any], keys: Any, stored: dict[MetadataIndex, Any]) -> Metadata:
    keys = {name: _keys(value) for name, value in _is(keys, dict).items()}
    if not keys.keys() <= entries.keys():
        raise ValueError("its parts do not belong together")
    return Metadata(entries, keys, stored)


def _entry(value: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if _is(value, _Record).name == f"{_DCP}BytesStorageMetadata":
        return BytesStorageMetadata()
    fields = _fields(value, "TensorStorageMetadata")
    dtype, *_ = _is(_is(fields["properties"], _Record).state, tuple)
    size = _size(fields["size"])
    chunks = [
        ChunkStorageMetadata(_size(chunk["offsets"]), _size(chunk["sizes"]))
        for chunk in (_fields(chunk, "ChunkStorageMetadata") for chunk in _is(fields["chunks"], list))
    ]
    return _tensor(_is(dtype, _Record).name, size, chunks)


def _tensor(dtype: str, size: torch.Size, chunks: list[ChunkStorageMetadata]) -> TensorStorageMetadata:
    bounds = (zip(chunk.offsets, chunk.sizes, size, strict=True) for chunk in chunks)
    inside = all(offset + length <= whole for bound in bounds for offset, length, whole in bound)
    if not inside or sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(size):
        raise ValueError("the parts of a tensor are not the whole of it")
    return TensorStorageMetadata(TensorProperties(dtype=_DTYPES[dtype]), size, chunks)


def _index(key: Any) -> MetadataIndex:
    fields = _fields(key, "MetadataIndex")
    offset, index = fields.get("offset"), fields.get("index")
    return MetadataIndex(
        _is(fields["fqn"], str), None if offset is None else _size(offset), None if index is None else _is(index, int)
    )


def _storage(value: Any) -> Any:
    fields = _fields(value, "_StorageInfo", _FILES)
    if fields.get("transform_descriptors"):
        raise ValueError("its tensors are compressed by an extension of DCP")
    return _place(fields["relative_path"], fields["offset"], fields["length"])


def _place(file: Any, offset: Any, length: Any) -> Any:
    if _is(offset, int) < 0 or _is(length, int) < 0:
        raise ValueError("a place in it is negative")
    return noted(_is(file, str), offset=offset, length=length)


def _check_files(places: Iterable[Any], path: Path) -> None:
    """Raise ValueError if a file is outside of the folder, missing, or smaller than the tensors in it."""
    ends: dict[str, int] = {}
    for place in places:
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    for name, end in ends.items():
        if PurePath(name).is_absolute() or ".." in PurePath(name).parts:
            raise _RefusedError(
                f"{path} names {name[:80]!r}, a file outside its folder. A checkpoint has all its files in its folder."
                " Take a checkpoint from a source that you trust; this one was changed."
            )
        file = path.parent / name
        if not os.path.isfile(file):  # unlike Path.is_file, it accepts names that are invalid on any system
            raise ValueError(f"it names {name[:80]!r}, which is not there")
        if file.stat().st_size < end:
            raise _RefusedError(meta.damage(file, EOFError("its end is missing")))


def _check_parts(found: Metadata) -> None:
    """Raise ValueError if a part of an entry is not stored, or in fewer bytes than it has."""
    for name, entry in found.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            indices = [(MetadataIndex(name), 0)]
        else:
            width = entry.properties.dtype.itemsize
            indices = [(MetadataIndex(name, chunk.offsets), math.prod(chunk.sizes) * width) for chunk in entry.chunks]
        for index, nbytes in indices:
            place = found.storage_data.get(index)
            if place is None or place.length < nbytes:
                raise ValueError(f"a part of {name} is stored nowhere")


def _fields(record: Any, kind: str, module: str = _DCP) -> Mapping[str, Any]:
    if _is(record, _Record).name != f"{module}{kind}":
        raise ValueError(f"{record.name} stands in it for {kind}")
    return _is(record.state, dict)


def _size(value: Any) -> torch.Size:
    if min(_is(value, torch.Size), default=0) < 0:
        raise ValueError("a size in it is negative")
    return value


def _keys(value: Any) -> tuple[str | int, ...]:
    keys = tuple(value) if type(value) in (tuple, list) else ()
    if not keys or not all(type(key) in (str, int) for key in keys):
        raise ValueError("it names no place for an entry")
    return keys


def _is(value: Any, kind: type[_T]) -> _T:
    if type(value) is not kind:
        raise TypeError(f"a {type(value).__name__} stands in it for a {kind.__name__}")
    return value


def _foreign(path: Path, name: str) -> str:
    return (
        f"{path} names {name}, which DCP does not write there."
        " Reading it would run code that the file names."
        " Take a checkpoint from a source that you trust; this one was changed, or was not written by torch."
    )
