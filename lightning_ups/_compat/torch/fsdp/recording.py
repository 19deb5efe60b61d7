"""Initializes a module that was built on the meta device as if it had been built in place.

Operations of a constructor on its tensors are recorded on the meta device, where they cost nothing, and replayed later,
on one whole tensor after another, in the same order and from the same generator state. Every weight is therefore
bitwise equal to that of a module built in place, however it is initialized, and each rank keeps its part of a tensor
and frees the rest before the next one. A value that is overwritten later only advances the generator.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map

from lightning_ups._compat.patches import applied

_DRAWING = ("normal_", "uniform_", "random_", "exponential_", "cauchy_", "log_normal_", "geometric_")
_OVERWRITE = frozenset((*_DRAWING, "fill_", "zero_", "copy_"))
_DRAWS = frozenset(("apply", "rand", "randn", "randint", "randperm", "deepcopy", "init_weights", "_init_weights"))
_REGISTERED = frozenset(("_parameters", "_buffers", "_modules"))
_NOTHING = (lambda: None).__code__
_DEVICE_MODE = DeviceContext.__torch_function__.__code__.co_filename
_EMPTY = frozenset(("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"))


@dataclass(frozen=True)
class Place:
    """A tensor of the recording: its memory, and its place in it."""

    memory: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Loose:
    """A tensor that is neither parameter nor buffer: its container, its key there, and its place."""

    holder: Any
    key: Any
    place: Place


@dataclass
class _Operation:
    function: Any
    args: Any
    kwargs: Any
    made: list[Place]  # in newly allocated memory
    touched: set[int]
    overwrites: int | None = None  # the memory whose content is completely overwritten


@dataclass
class Recording:
    """The recorded operations on tensors on the meta device.

    Args:
        states: The states of torch's CPU generator: at the beginning, and after each new seed.
        made_here: Whether the tensors themselves were created during the recording.
    """

    states: list[Tensor]
    made_here: bool
    operations: list[_Operation] = field(default_factory=list)
    constants: dict[int, Tensor] = field(default_factory=dict)
    alive: list[Tensor] = field(default_factory=list)  # otherwise the address of freed memory could be reused

    def places(self, model: nn.Module) -> dict[str, Place]:
        """Return the place of each parameter and buffer of ``model`` on the meta device, by all of its names."""
        tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        tensors |= dict(model.named_buffers(remove_duplicate=False))
        return {name: _place(tensor) for name, tensor in tensors.items() if tensor.is_meta}

    def loose(self, model: nn.Module) -> dict[str, "Loose"]:
        """Return the tensors of ``model`` on the meta device that are neither parameters nor buffers.

        They are attributes of modules, or in a dict or list that is one. Tensors that share memory with a parameter or
        buffer are left out, and so are tensors without recorded operations.
        """
        named = {place.memory for place in self.places(model).values()}
        found = {
            f"{name}.{attribute}[{key!r}]": Loose(holder, key, _place(tensor))
            for name, module in model.named_modules()
            for attribute, value in vars(module).items()
            if attribute not in _REGISTERED
            for holder, key, tensor in _held(vars(module), attribute, value)
            if tensor.is_meta and _memory(tensor) not in named
        }
        return {name: loose for name, loose in found.items() if self.knows(loose.place)}

    def note_seed(self) -> None:
        """Record whether the generator was seeded: nothing draws on the meta device, so a changed state was set."""
        if not torch.equal(state := torch.get_rng_state(), self.states[-1]):
            self.operations.append(_Operation(torch.set_rng_state, len(self.states), {}, [], set()))
            self.states.append(state)

    def knows(self, place: Place) -> bool:
        """Return whether any operation was recorded on the memory of ``place``."""
        return place.memory in self.constants or any(place.memory in o.touched for o in self.operations)

    def drop_unused(self, model: nn.Module, *, since: int) -> None:
        """Forget operations from number ``since`` on that no tensor of ``model`` comes from."""
        places = (*self.places(model).values(), *(loose.place for loose in self.loose(model).values()))
        needed = {place.memory for place in places}
        kept = []
        for operation in reversed(self.operations[since:]):
            if needed & operation.touched or operation.function is torch.set_rng_state:
                needed |= operation.touched
                kept.append(operation)
        self.operations[since:] = reversed(kept)


@contextmanager
def recording(*, made_here: bool = True) -> Iterator[Recording]:
    """Record operations on tensors on the meta device while the context is open."""
    record = Recording([torch.get_rng_state()], made_here)
    hugging_face = InitialisingOnMeta()
    hugging_face.ensure()
    try:
        with _Above(record, hugging_face), _Operations(record):
            yield record
    finally:
        hugging_face.end()


def open_recordings() -> list[Recording]:
    """Return the recordings whose context is open."""
    return [mode.record for mode in _get_current_dispatch_mode_stack() if isinstance(mode, _Operations)]


def record_resets(model: nn.Module) -> tuple[Recording, list[str]]:
    """Record how a module on the meta device would be initialized, using the methods of its classes.

    These are ``reset_parameters`` of each module, children first, as constructors call it, and a Hugging Face model's
    own initialization.

    Returns:
        The recording, and the names of modules that do more in their constructor, which cannot be recorded any more.
    """
    unknown = [name or type(model).__name__ for name, m in model.named_modules() if _initialises_in_constructor(m)]
    writers: dict[int, int] = {}
    with torch.no_grad(), recording(made_here=False) as record:
        for module in _children_first(model):
            before = len(record.operations)
            reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
            if callable(reset):
                reset()
            for memory in {o.overwrites for o in record.operations[before:] if o.overwrites is not None}:
                writers[memory] = writers.get(memory, 0) + 1
            if any(base.__name__ == "PreTrainedModel" for base in type(module).__mro__):
                module.init_weights()  # type: ignore[operator]
    for name, place in record.places(model).items():
        if writers.get(place.memory, 0) > 1 and name not in unknown:
            unknown.append(name)  # tied: it is unknown whose value was kept
    return record, unknown


def _initialises_in_constructor(module: nn.Module) -> bool:
    kinds = [k for k in type(module).__mro__ if k.__module__.partition(".")[0] not in ("builtins", "transformers")]
    if isinstance(module, (nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder)):
        return True  # their layers are copies of one
    names = {
        name
        for kind in kinds
        if not kind.__module__.startswith(("torch.nn", "lightning.")) and "__init__" in vars(kind)
        for name in getattr(kind.__init__, "__code__", _NOTHING).co_names
    }
    return bool(names & _DRAWS) or any(name.endswith("_") and not name.startswith("_") for name in names)


def replay(
    record: Recording, places: Mapping[str, Place], store: Callable[[str, Tensor], None], *, device: torch.device
) -> list[str]:
    """Replay the recording on ``device``, and pass each whole tensor of ``places`` to ``store`` when it is final.

    Args:
        record: The recording.
        places: The tensors that are needed.
        store: Stores a part of a tensor.
        device: The device of the replay; values are those of a module built there.

    Returns:
        The names of tensors without a value.
    """
    wanted: dict[int, list[str]] = {}
    for name, place in places.items():
        wanted.setdefault(place.memory, []).append(name)
    done: set[int] = set()

    def finish(memory: int, storage: Tensor) -> None:
        for name in wanted.get(memory, ()):
            store(name, _tensor(places[name], storage))
        done.add(memory)

    _Replay(record, device, finish).run()
    for memory, constant in record.constants.items():
        if memory not in done:
            finish(memory, constant.to(device))
    return [name for memory, names in wanted.items() if memory not in done for name in names]


class InitialisingOnMeta:
    """Lets ``PreTrainedModel.init_weights`` run on any device, from ``ensure`` until ``end``.

    ``transformers`` may be imported at any time, and is never imported here.
    """

    def __init__(self) -> None:
        self._undo: ExitStack | None = None

    def ensure(self) -> None:
        """Start, if ``transformers`` is imported by now."""
        if self._undo is not None or not hasattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel"):
            return  # not imported, or only in part
        self._undo = ExitStack()
        target = "transformers.modeling_utils:PreTrainedModel.init_weights"
        self._undo.enter_context(applied(target, _initializing, once=True))

    def end(self) -> None:
        """Restore the original."""
        if self._undo is not None:
            self._undo.close()
            self._undo = None


def _initializing(stock: Callable[..., None]) -> Callable[..., None]:
    def init_weights(model: Any, *args: Any, **kwargs: Any) -> None:
        if hasattr(model, "initialize_weights"):
            model.initialize_weights()
        stock(model, *args, **kwargs)  # on meta it only ties

    return init_weights


class _Above(TorchFunctionMode):
    """Records values from Python, and initializers that skip the meta device, which dispatch does not show."""

    _FROM_VALUES = (torch.tensor, torch.as_tensor, torch.asarray)

    def __init__(self, record: Recording, hugging_face: InitialisingOnMeta) -> None:
        super().__init__()
        self._record, self._hugging_face = record, hugging_face

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._hugging_face.ensure()  # it may be imported within a `configure_model`
        out = func(*args, **(kwargs or {}))
        if func in self._FROM_VALUES and isinstance(out, Tensor) and out.is_meta:
            real = func(*args, **{**(kwargs or {}), "device": "cpu"})
            self._record.alive.append(out)
            self._record.constants[_memory(out)] = real.detach().contiguous().flatten()
        elif out is True and getattr(func, "__self__", None) is torch.Tensor.is_meta:
            self._note_initialiser(sys._getframe(1), args[0])
        return out

    def _note_initialiser(self, frame: FrameType | None, tensor: Tensor) -> None:
        # Initializers that draw until a condition holds, or decompose, return at once for a tensor on meta.
        while frame is not None and frame.f_code.co_filename == _DEVICE_MODE:  # `with torch.device("meta")` is a mode
            frame = frame.f_back
        if frame is None or frame.f_code.co_filename != nn.init.__file__:
            return
        code = frame.f_code
        arguments = {name: frame.f_locals[name] for name in code.co_varnames[: code.co_argcount]}
        self._record.note_seed()
        self._record.alive.append(tensor)
        self._record.operations.append(
            _Operation(
                vars(nn.init)[code.co_name],
                (),
                tree_map(_place_of_meta, arguments),
                [],
                {_memory(tensor)},
                _memory(tensor) if _covers(tensor) else None,
            )
        )


class _Operations(TorchDispatchMode):
    def __init__(self, record: Recording) -> None:
        super().__init__()
        self.record = record
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        read = [t for t in _tensors((args, kwargs)) if t.is_meta]
        results = [t for t in _tensors(out) if t.is_meta]
        if read or results:
            self._note(func, args, kwargs, read, results)
        return out

    def _note(self, func: Any, args: Any, kwargs: Any, read: list[Tensor], results: list[Tensor]) -> None:
        before = {_memory(t) for t in read}
        made = [t for t in results if _memory(t) not in before]
        mutates = func._schema.is_mutable
        if not made and not mutates:
            return  # a view: operations on it are recorded by memory and place
        self.record.note_seed()
        self.record.alive += [*read, *results]
        name = func._schema.name.partition("::")[2]
        overwrites = None
        if mutates and name in _OVERWRITE and _covers(args[0]):
            others = {_memory(t) for t in _tensors((args[1:], kwargs)) if t.is_meta}
            overwrites = _memory(args[0]) if _memory(args[0]) not in others else None
        self.record.operations.append(
            _Operation(
                None if name in _EMPTY else func,
                tree_map(_place_of_meta, args),
                tree_map(_place_of_meta, kwargs),
                [_place(t) for t in made],
                before | {_memory(t) for t in results},
                overwrites,
            )
        )


class _Replay:
    def __init__(self, record: Recording, device: torch.device, finish: Callable[[int, Tensor], None]) -> None:
        self._record, self._device, self._finish = record, device, finish
        self._memory: dict[int, Tensor] = {m: t.to(device) for m, t in record.constants.items()}
        self._uses: dict[int, list[int]] = {}
        for i, operation in enumerate(record.operations):
            for memory in operation.touched:
                self._uses.setdefault(memory, []).append(i)
        self._sizes: dict[int, tuple[int, torch.dtype]] = {}
        for tensor in record.alive:
            storage = tensor.untyped_storage()
            self._sizes[_memory(tensor)] = (storage.nbytes() // tensor.element_size(), tensor.dtype)

    @torch.no_grad()
    def run(self) -> None:
        for i, operation in enumerate(self._record.operations):
            if operation.function is not None:
                self._do(operation)
            for memory in operation.touched:
                self._free_if_over(memory, i)

    def _do(self, operation: _Operation) -> None:
        if operation.function is torch.set_rng_state:
            torch.set_rng_state(self._record.states[operation.args])
            return
        args, kwargs = tree_map(self._real, (operation.args, operation.kwargs))
        out = operation.function(*args, **kwargs)
        made = {place.memory: place for place in operation.made}
        for tensor, place in zip(_fresh(out, args, kwargs), made.values(), strict=False):
            whole = torch.empty(self._sizes[place.memory][0], dtype=place.dtype, device=self._device)
            _tensor(place, whole).copy_(tensor)  # with the recorded strides: a kernel's may differ
            self._memory[place.memory] = whole

    def _real(self, value: Any) -> Any:
        if isinstance(value, Place):
            return _tensor(value, self._real_memory(value.memory))
        if isinstance(value, torch.device):
            return self._device
        return value.to(self._device) if isinstance(value, Tensor) else value

    def _free_if_over(self, memory: int, now: int) -> None:
        later = next((i for i in self._uses[memory] if i > now), None)
        if later is None:
            if memory in self._memory or self._record.made_here:
                whole = self._real_memory(memory)
                del self._memory[memory]
                self._finish(memory, whole)
        elif self._record.operations[later].overwrites == memory:
            self._memory.pop(memory, None)

    def _real_memory(self, memory: int) -> Tensor:
        if memory not in self._memory:
            size, dtype = self._sizes[memory]
            self._memory[memory] = torch.zeros(size, dtype=dtype, device=self._device)
        return self._memory[memory]


def _held(holder: Any, key: Any, value: Any) -> Iterator[tuple[Any, Any, Tensor]]:
    if isinstance(value, Tensor):
        yield holder, key, value
    entries: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    yield from ((value, inner, entry) for inner, entry in entries if isinstance(entry, Tensor))


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _place(tensor: Tensor) -> Place:
    return Place(
        _memory(tensor), int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype
    )


def _place_of_meta(value: Any) -> Any:
    return _place(value) if isinstance(value, Tensor) and value.is_meta else value


def _tensor(place: Place, memory: Tensor) -> Tensor:
    typed = memory if memory.dtype == place.dtype else memory.view(torch.uint8).view(place.dtype)
    return typed.as_strided(place.shape, place.stride, place.offset)


def _covers(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _fresh(out: Any, args: Any, kwargs: Any) -> list[Tensor]:
    given = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs)) if t.numel()}
    return [t for t in _tensors(out) if not t.numel() or t.untyped_storage().data_ptr() not in given]


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _children_first(module: nn.Module, seen: set[nn.Module] | None = None) -> Iterator[nn.Module]:
    seen = set() if seen is None else seen
    if module not in seen:
        seen.add(module)
        for child in module.children():
            yield from _children_first(child, seen)
        yield module
