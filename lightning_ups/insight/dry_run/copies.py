"""Copies of a module and of all that it holds, with fake tensors, so that a dry run changes nothing of the run.

Objects get a copy of the same class, attribute by attribute. Random generators and iterators continue where the
original is. Only objects that a step cannot change are shared. Anything else becomes a `NotCopied` object, which raises
when the step uses it. Large data is not duplicated: a long NumPy array becomes a read-only view.

Containers and objects of C are copied through a pickle stream; everything else in that stream is a reference.
"""

import functools
import io
import logging
import pickle
import sys
import threading
import types
import warnings
import weakref
from array import array
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext, suppress
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from typing_extensions import override

from lightning_ups._compat.torch.fake_tensors import FakeTensorMode
from lightning_ups.insight.dry_run.kinds import (
    IMMUTABLE,
    NotCopied,
    Uses,
    can_pickle,
    has_own_end,
    is_plain,
    is_shared,
    slots_of,
)

_MAX_ARRAY_BYTES = 2**20  # longer arrays are views
_MAX_CONTAINER_BYTES = 2**24  # of numbers and strings
_MAX_BYTES = 2**26  # of all arrays and containers
_MAX_ITEMS = 2**16  # objects in one container
_MAX_ALL_ITEMS = 2**18
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_LOCKS = (type(threading.Lock()), type(threading.RLock()))
_LRU_CACHE = type(functools.lru_cache(int))
_BY_PICKLE: Any = object()  # copied by the pickle stream itself
_REDUCED = (
    types.MethodType,
    types.BuiltinMethodType,
    types.MethodWrapperType,
    types.MappingProxyType,
    functools.partial,
    weakref.ref,
    *weakref.ProxyTypes,
    _LRU_CACHE,
)


class FakeCopies:
    """Copies each object once, so that shared objects stay shared and cycles stay cycles.

    Args:
        mode: Makes the fake tensors. None: the copies are on the meta device.
        dtype: The dtype of floating-point parameters. None: unchanged.
    """

    def __init__(self, *, mode: FakeTensorMode | None = None, dtype: torch.dtype | None = None) -> None:
        self.mode, self.dtype = mode, dtype
        self.device = torch.device("meta" if mode is None else "cpu")
        self.uses = Uses()
        self._kept: dict[int, tuple[Any, int]] = {}  # the original, kept alive because of its id, and its index
        self._copies: list[Any] = []
        self._unfilled: list[tuple[Any, Callable[[], None]]] = []
        self._places: dict[int, tuple[Any, str]] = {}  # in which object and attribute an original is
        self._owner, self._attribute, self._root = None, "", "self"
        self._items, self._bytes = _MAX_ALL_ITEMS, _MAX_BYTES
        self._stream = io.BytesIO()
        self._pickler: pickle.Pickler | None = _Pickler(self._stream, self._reference)
        self._unpickler: pickle.Unpickler | None = _Unpickler(self._stream, self._copies)

    def copy(self, value: Any, name: str = "self") -> Any:
        """Return the copy of ``value``, which errors call ``name``."""
        self._root = name
        copied = self._by_pickle(value)
        while self._unfilled:
            self._owner, fill = self._unfilled.pop()
            fill()
        self._owner = None
        return copied

    def copy_now(self, value: Any) -> Any:
        """Return the copy of a tensor or module that is found while another object is copied."""
        index = self._reference(value)
        return value if index is None else self._copies[index]

    def keep(self, value: Any, copied: Any) -> int:
        """Use ``copied`` wherever ``value`` is found, and return its index."""
        self._kept[id(value)] = value, len(self._copies)
        self._places[id(value)] = self._owner, self._attribute
        self._copies.append(copied)
        return len(self._copies) - 1

    def close(self) -> None:
        """Release all originals, which may be large."""
        for each in (self._kept, self._copies, self._unfilled, self._places):
            each.clear()
        self._pickler = self._unpickler = None  # with their memos

    # What a subclass may change

    def tensor(self, tensor: Tensor) -> Tensor:
        """Return a fake tensor with the shape, strides and dtype of ``tensor``."""
        is_parameter = isinstance(tensor, nn.Parameter)
        dtype = self.dtype if is_parameter and self.dtype and tensor.is_floating_point() else tensor.dtype
        with self.mode or nullcontext():
            if tensor.layout is torch.strided:
                fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=self.device)
            else:
                fake = torch.empty(tensor.shape, dtype=dtype, device=self.device)
            if not is_parameter:
                return fake.requires_grad_(tensor.requires_grad and fake.is_floating_point())
            fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
        # Marks of the user's, such as one that exempts a parameter from weight decay.
        vars(fake).update({name: mark for name, mark in vars(tensor).items() if type(mark) in IMMUTABLE})
        return fake

    def module(self, module: nn.Module) -> Any:
        """Return the copy of ``module``, filled later. Metrics that are no losses become placeholders."""
        if isinstance(module, Metric) and not module.is_differentiable:
            return MetricPlaceholder()
        copied = self.shell(module, type(module))
        if isinstance(module, MetricCollection):
            names = [*module.keys()]
            methods = ("forward", "update", "compute", "reset")
            vars(copied).update(dict.fromkeys(methods, lambda *_, **__: dict.fromkeys(names, torch.tensor(0.0))))
        return copied

    def attributes(self, value: Any) -> dict[str, Any]:
        """Return the attributes of ``value`` to copy."""
        found = _attributes_of(value) or {}
        if isinstance(value, nn.Module):  # a LightningModule creates tensors on its device
            return {name: self.device if isinstance(inner, torch.device) else inner for name, inner in found.items()}
        return found

    # Objects

    def shell(self, value: Any, kind: Any) -> Any:
        """Return an empty object of class ``kind``, filled later with the copied attributes of ``value``."""
        try:
            copied = object.__new__(kind)
        except TypeError:  # a class of C, such as SimpleNamespace
            copied = kind.__new__(kind)
        self._unfilled.append((value, lambda: self._fill(value, copied)))
        return copied

    def _fill(self, value: Any, copied: Any) -> None:
        if (attributes := _attributes_of(copied)) is not None:
            for name, inner in [*self.attributes(value).items()]:
                self._attribute = name
                attributes[name] = self._by_pickle(inner)
        for slot in slots_of(type(value)):
            self._attribute = slot.__name__
            with suppress(AttributeError):  # never assigned
                slot.__set__(copied, self._by_pickle(slot.__get__(value)))

    def _by_pickle(self, value: Any) -> Any:
        assert self._pickler is not None, "closed"
        assert self._unpickler is not None
        self._stream.seek(0)
        self._pickler.dump(value)
        self._stream.seek(0)
        return self._unpickler.load()

    def _reference(self, value: Any) -> int | None:
        """Return the index of the copy of ``value``, or None if pickle copies it."""
        kind = type(value)
        if kind in (types.NoneType, bool, int, float):
            return None
        if (kept := self._kept.get(id(value))) is not None:
            return kept[1]
        try:
            copied = self._copy_of(value, kind)
        except Exception as error:  # noqa: BLE001  (a user's class may raise anything)
            copied = self.not_copied(value, f"which cannot be copied ({str(error).partition(chr(10))[0][:100]})")
        return None if copied is _BY_PICKLE else self.keep(value, copied)

    def _copy_of(self, value: Any, kind: type) -> Any:
        if kind in IMMUTABLE or kind is NotCopied:
            return value
        if issubclass(kind, Tensor):
            return self.tensor(value)
        if issubclass(kind, nn.Module):
            return self.module(value)
        if issubclass(kind, (*_CONTAINERS, bytearray, array)):
            return self._container(value, kind)
        if is_shared(kind) or (issubclass(kind, weakref.ref) and value() is None):
            return value
        if issubclass(kind, types.FunctionType):
            return self._function(value)
        if issubclass(kind, _LOCKS):
            return kind()
        if issubclass(kind, logging.Logger):
            silent = logging.Logger(value.name)
            silent.disabled = True
            return silent
        if issubclass(kind, torch.Generator):
            return value.clone_state()
        numpy = sys.modules.get("numpy")
        if numpy is not None and issubclass(kind, numpy.ndarray):
            return self._array(value, numpy)
        if kind in _REDUCED:
            return _BY_PICKLE
        if has_own_end(kind):
            return self.not_copied(value)
        if is_plain(kind):
            return self.shell(value, kind)
        if any(str(base.__module__).partition(".")[0] == "torch" for base in kind.__mro__):
            return value  # streams, process groups
        return self._by_reduce(value) if can_pickle(kind) else self.not_copied(value)

    def _by_reduce(self, value: Any) -> Any:
        reduced = _reduce(value)  # raises if it cannot be pickled, as a generator does
        if not isinstance(reduced, str):
            self.keep(reduced[0], reduced[0])  # the function that creates the copy
        return _BY_PICKLE

    def not_copied(self, value: Any, why: str = "which cannot be copied") -> NotCopied:
        """Return a placeholder for ``value``."""
        name = type(value).__name__
        article = "an" if name[:1].lower() in "aeiou" else "a"
        return NotCopied(self.uses, f"{self._path(value)}, {article} {name}, {why}")

    def _path(self, value: Any) -> str:
        path, (owner, attribute) = "", (self._owner, self._attribute)
        while owner is not None:
            path, value = _name_in(owner, attribute, value) + path, owner
            owner, attribute = self._places[id(owner)]
        return self._root + path

    # Containers and functions

    def _container(self, value: Any, kind: type) -> Any:
        base = next(base for base in (*_CONTAINERS, bytearray, array) if issubclass(kind, base))
        size, each = base.__len__(value), 64 if base is dict else 8
        if base in (bytearray, array):
            fits = self._takes(memoryview(value).nbytes, _MAX_CONTAINER_BYTES)
        elif IMMUTABLE.issuperset(
            map(type, chain(dict.keys(value), dict.values(value)) if base is dict else base.__iter__(value))
        ):
            fits = self._takes(size * each, _MAX_CONTAINER_BYTES)
        else:
            fits = size <= min(_MAX_ITEMS, self._items)
            self._items -= size if fits else 0
        if not fits:
            return self.not_copied(value, f"whose {size:,} items are too many to copy")
        return _BY_PICKLE if kind in _CONTAINERS else self._by_reduce(value)

    def _takes(self, size: int, most: int) -> bool:
        fits = size <= min(most, self._bytes)
        self._bytes -= size if fits else 0
        return fits

    def _array(self, value: Any, numpy: Any) -> Any:
        if value.dtype.hasobject:
            fits = value.dtype == object and value.size <= min(_MAX_ITEMS, self._items)
            return _BY_PICKLE if fits else self.not_copied(value)
        if self._takes(value.nbytes, _MAX_ARRAY_BYTES):
            return value.copy(order="K")
        if type(value) not in (numpy.ndarray, numpy.memmap):
            return self.not_copied(value)
        view = value.view()
        view.flags.writeable = False
        return view

    def _function(self, value: Any) -> Any:
        if hasattr(value, "_torchdynamo_orig_callable"):
            return _BY_PICKLE
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        if value.__closure__ is None and {types.FunctionType, *IMMUTABLE}.issuperset(map(type, defaults)):
            return value
        cells = tuple(self._cell(cell) for cell in value.__closure__ or ()) or None
        copied = types.FunctionType(value.__code__, value.__globals__, value.__name__, None, cells)
        copied.__module__, copied.__qualname__ = value.__module__, value.__qualname__

        def fill() -> None:
            copied.__defaults__, copied.__kwdefaults__ = self._by_pickle((value.__defaults__, value.__kwdefaults__))
            vars(copied).update(self._by_pickle(vars(value)))

        self._unfilled.append((value, fill))
        return copied

    def _cell(self, cell: types.CellType) -> types.CellType:
        if (kept := self._kept.get(id(cell))) is not None:  # functions share it
            return self._copies[kept[1]]
        copied = types.CellType()

        def fill() -> None:
            with suppress(ValueError):  # never assigned
                copied.cell_contents = self._by_pickle(cell.cell_contents)

        self.keep(cell, copied)
        self._unfilled.append((cell, fill))
        return copied


class MetricPlaceholder(nn.Module):
    """Replaces a metric of torchmetrics, which costs next to nothing and often needs values: methods return zero."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self.forward

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return torch.tensor(0.0)


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, reference: Callable[[Any], int | None]) -> None:
        super().__init__(stream, protocol=5)
        self._reference = reference

    def persistent_id(self, value: Any) -> int | None:
        return self._reference(value)

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if kind is types.MethodType:
            return types.MethodType, (value.__func__, value.__self__)
        if kind is weakref.ref:
            return weakref.ref, (value(),)
        if kind in weakref.ProxyTypes:
            return weakref.proxy, (value.__repr__.__self__,)
        if kind is types.MappingProxyType:
            return types.MappingProxyType, (dict(value),)
        if kind is _LRU_CACHE:  # so that nothing of a dry run stays in the cache of the run
            return _same, (value.__wrapped__,)
        if kind is types.FunctionType:  # what torch.compile returned
            return _same, (value._torchdynamo_orig_callable,)
        return _reduce(value)


def _reduce(value: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # copies of iterators are deprecated
        return value.__reduce_ex__(4)


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, copies: list[Any]) -> None:
        super().__init__(stream)
        self._copies = copies

    def persistent_load(self, index: int) -> Any:
        return self._copies[index]


def _same(value: Any) -> Any:
    return value


def _attributes_of(value: Any) -> dict[str, Any] | None:
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None


def _name_in(owner: Any, attribute: str, value: Any) -> str:
    if attribute in ("_modules", "_parameters", "_buffers"):
        return next((f".{name}" for name, inner in getattr(owner, attribute).items() if inner is value), "")
    return f".{attribute}" if (_attributes_of(owner) or {}).get(attribute) is value else f".{attribute}[...]"
