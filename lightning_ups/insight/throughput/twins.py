"""Twins of whatever a module holds, so that a step can be tried on them and the run's own objects stay as they are.

An object has a twin of its class with twins of its attributes; a generator of random numbers and an iterator stand
where the run's own do. Shared is only what nothing changes. What has no twin is not touched: see `Untouched`.
Nothing large is copied: long arrays are seen through a view that cannot be written.
"""

import functools
import logging
import operator
import sys
import threading
import types
import warnings
import weakref
from abc import ABC, abstractmethod
from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_ups.insight.throughput.kinds import INERT, is_plain, is_rebuilt, is_refused, is_shared, slots_of
from lightning_ups.insight.throughput.untouched import Untouched, Watch

__all__ = ["Twins"]

_ARRAY_BYTES = 2**20  # of one that is copied; a longer one is seen through a view
_PLAIN_BYTES = 2**24  # of a container of numbers and texts
_ALL_BYTES = 2**26
_MOST_IN_ONE = 2**16  # objects in one container
_MOST = 2**18  # objects in all containers
_LOCKS = (type(threading.Lock()), type(threading.RLock()))
_METHODS = (types.BuiltinMethodType, types.MethodWrapperType)


class Twins(ABC):
    """Makes each object's twin once, so that what is shared stays shared, and what is in a cycle, too.

    Args:
        instead: Objects that have another stand-in, and what makes it of `Twins.value`.
    """

    def __init__(self, instead: Iterable[tuple[Any, Callable[[Any], Any]]] = ()) -> None:
        self.watch = Watch()
        self._made: dict[int, tuple[Any, Any]] = {}  # with the object, whose number would be given to another
        self._path: list[str] = []
        self._left, self._bytes = _MOST, _ALL_BYTES
        for value, make in instead:
            self._keep(value, make(self.value))

    @abstractmethod
    def tensor(self, tensor: Tensor) -> Tensor:
        """Return a new twin."""

    @abstractmethod
    def module(self, module: nn.Module) -> Any:
        """Return a new twin, which is kept before it is filled."""

    def value(self, value: Any, name: str = "") -> Any:
        """Return what stands for ``value``, which is reached by ``name`` from what is being made."""
        kind = type(value)
        if kind in INERT:
            return value
        if (made := self._made.get(id(value))) is not None:
            return made[1]
        if issubclass(kind, Tensor):
            return self._keep(value, self.tensor(value))
        depth = len(self._path)
        self._path.append(name)
        try:
            return self._keep(value, self._twin(value, kind))
        except Exception as error:  # noqa: BLE001  (what a user's class raises when it is made or hashed)
            del self._path[depth + 1 :]
            reason = f"{error}".partition("\n")[0][:100] or type(error).__name__
            return self._keep(value, self._untouched(value, f"of which there can be no copy ({reason})"))
        finally:
            del self._path[depth:]

    def close(self) -> None:
        """Forget all objects of the run, which may be large, such as a batch."""
        self._made.clear()

    def _keep(self, value: Any, twin: Any) -> Any:
        self._made[id(value)] = value, twin
        return twin

    def _untouched(self, value: Any, why: str = "of which there can be no copy") -> Untouched:
        name = type(value).__name__
        article = "an" if name[:1].lower() in "aeiou" else "a"
        return Untouched(self.watch, f"{''.join(self._path)}, {article} {name}, {why}")

    def _twin(self, value: Any, kind: type) -> Any:
        if issubclass(kind, nn.Module):
            return self.module(value)
        if is_shared(kind):
            return value
        for base, make in _MAKERS:
            if issubclass(kind, base):
                return make(self, value)
        numpy = sys.modules.get("numpy")
        if numpy is not None and issubclass(kind, numpy.ndarray):
            return self._array(value, numpy)
        if is_refused(kind):
            return self._untouched(value)
        if is_plain(kind):
            return self._attributes(value, self._keep(value, _shell(kind)))
        if any(str(base.__module__).partition(".")[0] == "torch" for base in kind.__mro__):
            return value  # streams, groups of processes
        return self._rebuilt(value) if is_rebuilt(kind) else self._untouched(value)

    def _attributes(self, value: Any, twin: Any) -> Any:
        if (own := _own(value)) is not None:
            into = cast("dict[str, Any]", _own(twin))
            for name, inner in [*own.items()]:
                hooks = type(inner) is OrderedDict and name.endswith("_hooks")  # they belong to the run
                into[name] = OrderedDict() if hooks else self.value(inner, f".{name}")
        for slot in slots_of(type(value)):
            try:
                inner = slot.__get__(value)
            except AttributeError:  # nothing was put there
                continue
            slot.__set__(twin, self.value(inner, f".{slot.__name__}"))
        return twin

    # Containers

    def _fits(self, size: int, items: Iterable[Any], each: int = 8) -> bool:
        if INERT.issuperset(map(type, items)):
            return self._copies(size * each, _PLAIN_BYTES)
        fits = size <= min(_MOST_IN_ONE, self._left)
        self._left -= size if fits else 0
        return fits

    def _copies(self, size: int, most: int) -> bool:
        fits = size <= min(most, self._bytes)
        self._bytes -= size if fits else 0
        return fits

    def _too_long(self, value: Any, size: int) -> Untouched:
        return self._untouched(value, f"whose {size:,} items are too many to copy")

    def _all(self, items: Iterable[Any]) -> list[Any]:
        return [self.value(item, "[...]") for item in items]

    def _list(self, value: Any, base: Any = list) -> Any:
        size = base.__len__(value)
        if not self._fits(size, base.__iter__(value)):
            return self._too_long(value, size)
        twin = self._keep(value, base.__new__(type(value)))
        if base is deque:
            deque.__init__(twin, (), value.maxlen)
        add = base.update if base is set else base.extend
        add(twin, self._all(base.__iter__(value)))
        return self._attributes(value, twin)

    def _tuple(self, value: Any, base: Any = tuple) -> Any:
        kind, size = type(value), base.__len__(value)
        if not self._fits(size, base.__iter__(value)):
            return self._too_long(value, size)
        items = self._all(base.__iter__(value))
        if (made := self._made.get(id(value))) is not None:  # one of the items holds it
            return made[1]
        if kind is base and all(map(operator.is_, items, base.__iter__(value))):
            return value
        twin = kind(items) if hasattr(kind, "n_sequence_fields") else base.__new__(kind, items)
        return self._attributes(value, self._keep(value, twin)) if _own(value) else twin

    def _dict(self, value: Any, base: Any = dict) -> Any:
        size = dict.__len__(value)
        if not self._fits(size, chain(dict.keys(value), dict.values(value)), each=64):
            return self._too_long(value, size)
        twin = self._keep(value, base.__new__(type(value)))
        if base is defaultdict:
            twin.default_factory = self.value(value.default_factory, ".default_factory")
        for key, inner in [*base.items(value)]:
            base.__setitem__(twin, self.value(key, "[...]"), self.value(inner, "[...]"))
        return self._attributes(value, twin)

    def _bytearray(self, value: Any) -> Any:
        return type(value)(value) if self._copies(len(value), _PLAIN_BYTES) else self._too_long(value, len(value))

    def _small_array(self, value: Any) -> Any:
        size = len(value) * value.itemsize
        return value[:] if self._copies(size, _PLAIN_BYTES) else self._too_long(value, len(value))

    def _array(self, value: Any, numpy: Any) -> Any:
        if value.dtype == object:
            if not self._fits(value.size, value.flat):
                return self._too_long(value, value.size)
            twin = self._keep(value, numpy.empty_like(value))
            for place in numpy.ndindex(value.shape):
                twin[place] = self.value(value[place], "[...]")
            return twin
        if value.dtype.hasobject:
            return self._untouched(value)
        if self._copies(value.nbytes, _ARRAY_BYTES):
            return value.copy(order="K")
        if type(value) not in (numpy.ndarray, numpy.memmap):
            return self._too_long(value, value.size)
        twin = value.view()
        twin.flags.writeable = False
        return twin

    # What can be called

    def _method(self, value: Any) -> Any:
        function, owner = self.value(value.__func__), self.value(value.__self__)
        return owner if isinstance(owner, Untouched) else types.MethodType(function, owner)

    def _builtin(self, value: Any) -> Any:
        owner = value.__self__
        twin = self.value(owner)
        return twin if isinstance(twin, Untouched) else value if twin is owner else getattr(twin, value.__name__)

    def _function(self, value: Any) -> Any:
        if (original := getattr(value, "_torchdynamo_orig_callable", None)) is not None:
            return self.value(original)  # of what is compiled
        defaults, keywords = self.value(value.__defaults__), value.__kwdefaults__ or {}
        keyword_twins = {name: self.value(inner, f"'s {name}") for name, inner in keywords.items()}
        same = defaults is value.__defaults__ and all(keyword_twins[name] is keywords[name] for name in keywords)
        if value.__closure__ is None and same:
            return value
        made = [self._cell(cell) for cell in value.__closure__ or ()]
        code, cells = value.__code__, tuple(cell for cell, _ in made) or None
        twin = self._keep(value, types.FunctionType(code, value.__globals__, value.__name__, defaults, cells))
        twin.__kwdefaults__, twin.__module__, twin.__qualname__ = keyword_twins, value.__module__, value.__qualname__
        vars(twin).update((name, self.value(inner, f".{name}")) for name, inner in vars(value).items())
        for name, (cell, original) in zip(code.co_freevars, made, strict=True):
            with suppress(ValueError):  # nothing was put there
                if original is not None:
                    cell.cell_contents = self.value(original.cell_contents, f"'s {name}")
        return twin

    def _cell(self, cell: types.CellType) -> tuple[types.CellType, types.CellType | None]:
        """Return what functions that share a cell share in its place, and if it is new, of which it gets its value."""
        if (made := self._made.get(id(cell))) is not None:
            return made[1], None
        return self._keep(cell, types.CellType()), cell

    def _partial(self, value: Any) -> Any:
        made = functools.partial.__new__(
            type(value),
            self.value(value.func),
            *self._all(value.args),
            **{name: self.value(inner, f"'s {name}") for name, inner in value.keywords.items()},
        )
        return self._attributes(value, made)

    def _uncached(self, value: Any) -> Any:
        return self.value(value.__wrapped__)  # what the step gives is not to stay in the run's cache

    # What else there is

    def _reference(self, value: Any) -> Any:
        inner = value()
        if inner is not None and type(value) is not weakref.ref:
            return self._untouched(value)  # it may know more than what it leads to
        return value if inner is None else weakref.ref(self.value(inner))

    def _proxy(self, value: Any) -> Any:
        return weakref.proxy(self.value(value.__repr__.__self__))

    def _logger(self, value: Any) -> Any:
        silent = logging.Logger(value.name)
        silent.disabled = True
        return silent

    def _random(self, value: torch.Generator) -> Any:
        return value.clone_state()

    def _rebuilt(self, value: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that iterators will not be copied one day
            reduced = value.__reduce_ex__(4)
        make, args, state, *_ = (*reduced, None)
        args = self._all(args)
        if (lost := next((arg for arg in args if isinstance(arg, Untouched)), None)) is not None:
            return lost
        twin = self._keep(value, self.value(make)(*args))
        if state is not None and hasattr(twin, "__setstate__"):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                twin.__setstate__(self.value(state))
        return self._attributes(value, twin)


def _shell(kind: Any) -> Any:
    try:
        return object.__new__(kind)
    except TypeError:  # one that C knows, such as a SimpleNamespace
        return kind.__new__(kind)


def _own(value: Any) -> dict[str, Any] | None:
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None


def _fixed(method: Callable[..., Any], base: type) -> Callable[[Twins, Any], Any]:
    return lambda twins, value: method(twins, value, base)


_MAKERS: tuple[tuple[Any, Callable[[Any, Any], Any]], ...] = (
    *((base, _fixed(Twins._list, base)) for base in (list, set, deque)),
    *((base, _fixed(Twins._tuple, base)) for base in (tuple, frozenset)),
    *((base, _fixed(Twins._dict, base)) for base in (OrderedDict, defaultdict, dict)),
    (bytearray, Twins._bytearray),
    (array, Twins._small_array),
    (types.MappingProxyType, lambda twins, value: types.MappingProxyType(twins.value(dict(value)))),
    (types.MethodType, Twins._method),
    (_METHODS, Twins._builtin),
    (types.FunctionType, Twins._function),
    (functools.partial, Twins._partial),
    (type(functools.lru_cache(int)), Twins._uncached),
    (weakref.ref, Twins._reference),
    (weakref.ProxyTypes, Twins._proxy),
    (_LOCKS, lambda _, value: type(value)()),
    (logging.Logger, Twins._logger),
    (torch.Generator, Twins._random),
)
