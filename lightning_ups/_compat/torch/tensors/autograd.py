"""Private names of autograd, checkpointing and the compiler's partitioner, for tensors saved for backward."""

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch._C import _len_torch_dispatch_stack
from torch._C._functorch import TransformType
from torch._functorch import config
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
    is_traceable_wrapper_subclass,
)
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode, checkpoint

from lightning_ups._compat.contexts import setting, values_set
from lightning_ups._compat.patches import applied

P = ParamSpec("P")
T = TypeVar("T")

_BUDGET = "activation_memory_budget"
_SELECTING = (_CachingTorchDispatchMode, _CachedTorchDispatchMode)


def changing_function_inputs(change: Callable[[Any], Any]) -> AbstractContextManager[None]:
    """Apply custom autograd functions to ``change(inputs)`` while the context is open.

    Functions of torch.distributed, such as those of a DTensor's methods, are not affected.
    """

    def changing(stock: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(stock)
        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if cls.__module__.startswith("torch.distributed."):
                return stock(cls, *args, **kwargs)
            return stock(cls, *change(args), **change(kwargs))

        return apply

    return applied("torch.autograd:Function.apply", changing)


@cache
def checkpoint_options() -> dict[str, Any]:
    """Return arguments of `torch.utils.checkpoint.checkpoint` that make all versions behave alike.

    A selective checkpoint does not pass its saved tensors to saved-tensor hooks, as in torch before 2.14.
    """
    name = "respect_saved_tensors_hooks"
    return {name: False} if name in inspect.signature(checkpoint).parameters else {}


def in_backward() -> bool:
    """Return whether autograd is running: a forward is then a recomputation."""
    return torch._C._current_graph_task_id() != -1


def in_torch_func() -> bool:
    """Return whether a transform of `torch.func`, such as ``vmap``, ``grad`` or ``jvp``, is active."""
    return torch._C._are_functorch_transforms_active()


def in_forward_ad() -> bool:
    """Return whether a level of forward-mode differentiation is open."""
    return forward_ad._current_level >= 0


def differentiated_by_torch_func() -> bool:
    """Return whether a transform of `torch.func` that differentiates, any but ``vmap``, is active."""
    return in_torch_func() and any(level.key() != TransformType.Vmap for level in retrieve_all_functorch_interpreters())


def keeps_graph() -> bool:
    """Return whether the running backward keeps its graph (``retain_graph``)."""
    return torch._C._autograd._get_current_graph_task_keep_graph()  # type: ignore[attr-defined]


@contextmanager
def activation_memory_budget(budget: float) -> Iterator[None]:
    """Set the share of activations that graphs keep, relative to the default, while the context is open.

    Contexts may be closed in any order.

    Raises:
        RuntimeError: If another share is set.
    """
    # A tiny bit more, so that no cache returns graphs that torch has split itself: their backward draws new random
    # numbers, while `random_numbers_kept` keeps them.
    value = math.nextafter(budget, 1.0)
    if others := {*values_set(config, _BUDGET)} - {value}:
        raise RuntimeError(
            f"memory_budget={budget} cannot be set while another fit of this process has {others.pop():.3g}, since"
            " torch has one setting for all. End the first fit before the second starts, or give both the same budget."
        )
    with setting(config, _BUDGET, value):
        yield


@contextmanager
def saves_seen_by(see: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Call ``see`` with each tensor that autograd saves, and pass it on to existing hooks.

    Only the innermost saved-tensor hooks are called, so a second pair would replace those of a checkpoint.
    """
    get_hooks = torch._C._autograd._top_saved_tensors_default_hooks  # type: ignore[attr-defined]
    hooks = get_hooks(False)  # noqa: FBT003  (a function of C, without keywords)
    pack, unpack = hooks or (lambda tensor: tensor, lambda packed: packed)

    def pack_and_see(tensor: torch.Tensor) -> Any:
        see(tensor)
        return pack(tensor)

    _mark_as_internal(pack_and_see, hooks)
    with torch.autograd.graph.saved_tensors_hooks(pack_and_see, unpack):
        yield


def saves_with_hooks() -> bool:
    """Return whether saved-tensor hooks are active, as in a checkpoint."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None  # type: ignore[attr-defined]  # noqa: FBT003


def operators_seen_by(
    see: Callable[[Any, Any], None], *, writes: Callable[[torch.Tensor], None]
) -> AbstractContextManager[Any]:
    """Call ``see`` with each operator and its result, and ``writes`` with each tensor written in place.

    Version counters do not record every write.
    """
    return _Operators(see, writes)


class _Operators(TorchDispatchMode):
    supports_higher_order_operators = True  # they have no schema, and are passed on; otherwise they raise

    def __init__(self, see: Callable[[Any, Any], None], writes: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self._see, self._writes = see, writes

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # compiled code inside stays compiled

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = getattr(func, "_schema", None)
        if schema is not None and schema.is_mutable:
            for i, argument in enumerate(schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    written = args[i] if i < len(args) else kwargs.get(argument.name)
                    for leaf in tree_leaves(written):
                        if isinstance(leaf, torch.Tensor):
                            self._writes(leaf)
        result = func(*args, **kwargs)
        self._see(func, result)
        return result


def has_values(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` has values, unlike tensors on the meta device or in a dry run."""
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


@contextmanager
def saved_at_any_version(tensors: Sequence[torch.Tensor], *, copies: bool = False) -> Iterator[None]:
    """Let backward read saved ``tensors`` even if they were written to since: as they were, with ``copies``."""
    if saves_with_hooks():
        yield  # with hooks, versions are not checked
        return
    memory = {tensor.data_ptr() for tensor in tensors if has_values(tensor)}

    def pack(tensor: torch.Tensor) -> tuple[torch.Tensor, int | None]:
        saved = tensor.detach()
        if has_values(saved) and saved.data_ptr() in memory:
            return saved.clone() if copies else saved, None
        return saved, saved._version

    def unpack(packed: tuple[torch.Tensor, int | None]) -> torch.Tensor:
        saved, version = packed
        if version not in (None, saved._version):
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation:"
                f" [{saved.type()} {[*saved.shape]}] is at version {saved._version}; expected version {version}"
            )
        return saved

    _mark_as_internal(pack, None)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _mark_as_internal(pack: Any, outer: Any) -> None:
    """Make ``pack`` look like ``outer`` to a selective checkpoint inside, which accepts torch's own hooks.

    Since torch 2.14 it warns about user hooks, and will call them for what it saves.
    """
    pack._checkpoint_internal, pack._user_hooks = True, outer


def hidden_from_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` such that Dynamo skips it and all that it calls, even between two graphs of one function.

    Unlike ``torch.compiler.disable``, it imports Dynamo at the first call, not before.
    """
    return cast(Callable[..., Any], torch._disable_dynamo(function))


def without_autocast(device: str) -> AbstractContextManager[Any]:
    """Return a context in which operations on ``device`` run in the dtypes of their inputs."""
    return nullcontext() if device == "meta" else torch.autocast(device, enabled=False)  # meta has no autocast


def outside_modes() -> AbstractContextManager[Any]:
    """Return a context that hides operations from dispatch modes, such as that of a selective checkpoint."""
    return _disable_current_modes()


def unseen_by_selection(function: Callable[P, T]) -> Callable[P, T]:
    """Return ``function`` hidden from selective checkpoints, but not from other dispatch modes."""

    @wraps(function)
    def hidden(*args: P.args, **kwargs: P.kwargs) -> T:
        if not _len_torch_dispatch_stack():
            return function(*args, **kwargs)
        with _without_selection():
            return function(*args, **kwargs)

    return hidden


@contextmanager
def _without_selection() -> Iterator[None]:
    stack = _get_current_dispatch_mode_stack()
    first = next((place for place, mode in enumerate(stack) if isinstance(mode, _SELECTING)), len(stack))
    popped: list[Any] = [_pop_mode() for _ in stack[first:]][::-1]
    others = [mode for mode in popped if not isinstance(mode, _SELECTING)]
    for mode in others:
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in others:
            _pop_mode()
        for mode in popped:
            _push_mode(mode)


def storages(tensor: torch.Tensor) -> Iterator[tuple[StorageWeakRef, int]]:
    """Yield the storages of ``tensor`` with their bytes; for wrapper subclasses, those of the inner tensors.

    The keys are weak references, which are unequal while they are held, even if the memory is reused.
    """
    if is_traceable_wrapper_subclass(tensor):
        parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        for part in parts:
            if isinstance(part, torch.Tensor):  # a DTensor also lists its mesh
                yield from storages(part)
    else:
        for part in dense_parts(tensor):
            storage = part.untyped_storage()
            yield StorageWeakRef(storage), storage.nbytes()


def dense_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the dense tensors in ``tensor``: indices and values if it is sparse, otherwise itself."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


def outside_function_modes() -> AbstractContextManager[None]:
    """Return a context that hides calls from function modes; DTensors and other subclasses work as before."""
    return torch._C.DisableTorchFunction()
