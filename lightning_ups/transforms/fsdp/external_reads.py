"""Finds parameters that are read outside the forward of the module that gathers them."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_ups._compat.torch.fsdp.state import gather_with_root, held_parameters
from lightning_ups._compat.torch.tensors.autograd import changing_function_inputs
from lightning_ups.transforms.compile import is_compiled
from lightning_ups.transforms.fsdp.model_forward import sharded_in
from lightning_ups.transforms.sharding import TENSOR, StepState

# Functions that query a tensor, or return a view without computing, and do not read its values.
# fmt: off
_ASKS = frozenset((
    "size", "dim", "ndimension", "numel", "nelement", "stride", "is_contiguous", "element_size",
    "storage_offset", "data_ptr", "untyped_storage", "is_floating_point", "is_complex", "is_sparse",
    "requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "detach", "full_tensor",
    "to_local", "get_device", "is_shared", "retain_grad", "__repr__", "__format__", "__hash__", "__len__",
    "__reduce_ex__",
))
# fmt: on
# fmt: off
_SHAPES = frozenset((  # their results are read next
    "t", "transpose", "permute", "view", "reshape", "squeeze", "unsqueeze", "flatten", "unflatten", "chunk", "split",
    "narrow", "expand", "select", "__getitem__",
))
# fmt: on
_VIEWS = frozenset(("T", "mT", "H", "mH", "real", "imag"))  # the properties that compute
_COPIES = frozenset(("clone", "zeros_like", "empty_like", "ones_like", "full_like", "rand_like", "randn_like", "to"))


class ExternalReads:
    """Finds the parameters that a step reads without calling their module. Repeated when other parameters are trained.

    Args:
        root: The sharded model.
        tell: Called with the names of the step and of the parameters found.
        note_idle: Called with the sharded modules that a training step did not call.
    """

    def __init__(
        self,
        root: FSDPModule,
        *,
        tell: Callable[[str, list[str]], None],
        note_idle: Callable[[set[Any]], None],
    ) -> None:
        self._root, self._tell, self._note_idle = root, tell, note_idle
        self._searched: set[tuple[str, frozenset[str]]] = set()
        self._reads: WatchedReads | None = None

    def begin(self, step: StepState, undo: ExitStack) -> None:
        """Called before a step, with the model's own group gathered; ``undo`` is closed when it ends or fails."""
        search = self._search(step)
        self._reads = None
        if search not in self._searched:
            self._searched.add(search)
            self._reads = WatchedReads(self._root)
            undo.enter_context(self._reads.watching())

    def end(self, step: StepState) -> None:
        """Called after a step."""
        reads, self._reads = self._reads, None
        if reads is None:
            return
        if step.is_training:
            self._note_idle(reads.idle)
        if reads.found:
            self._tell(step.name, reads.found)
        if reads.translates:
            self._searched.discard(self._search(step))  # it computes with shards each time, and needs them gathered

    def paused(self) -> AbstractContextManager[None]:
        """Stop watching, in the backward or the optimizer step of a manual step."""
        return nullcontext() if self._reads is None else self._reads.paused()

    def _search(self, step: StepState) -> tuple[str, frozenset[str]]:
        held = held_parameters(self._root)
        return step.name, frozenset(name for _, shard, _, name, _ in held if shard.requires_grad)


class WatchedReads(TorchFunctionMode):
    """While open, finds reads of parameters outside of their module, and lets the model's group gather these.

    A group is gathered when its module is called, and reduced after the backward of that call. If a weight is also read
    elsewhere, as a tied head by ``F.linear``, it would be a shard there, or its gradient would come too late. The
    model's own group stays unsharded from the start of a step until the end of its backward, so such a weight moves to
    it.

    Reads inside of blocks and of compiled code are not watched, since Dynamo would trace the watcher. Every rank must
    read the same parameters.

    Args:
        root: The sharded model, during a step.

    Attributes:
        found: Names of the parameters that the model's group gathers from now on.
        translates: Whether a tensor that was computed from shards, without gradients, was gathered for this step; the
            next step needs it again.
        idle: The sharded modules that have not been called.
    """

    def __init__(self, root: FSDPModule) -> None:
        super().__init__()
        self.found: list[str] = []
        self.translates = False
        self.idle: set[Any] = set()
        self._root = root
        self._homes: dict[Tensor, tuple[nn.Module, str, Any]] = {}
        self._running: list[nn.Module] = []
        self._paused = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch until the end of the context."""
        with ExitStack() as hooks:
            below = [module for module in self._root.modules() if module is not self._root]  # type: ignore[attr-defined]
            compiled = {module for module in below if is_compiled(module)}
            within = {inner for module in compiled for inner in module.modules() if inner is not module}
            self.idle |= {module for module in below if isinstance(module, FSDPModule)}
            for module in below:
                if module not in within and (isinstance(module, FSDPModule) or module in compiled):
                    self._follow(module, hooks, looks_away=module in compiled or len(sharded_in(module)) == 1)
            with self:
                yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop watching until the end of the context."""
        if self._paused:  # an optimizer's closure calls backward
            yield
            return
        self.__exit__(None, None, None)
        self._paused = True  # recomputation in backward also calls these hooks
        try:
            yield
        finally:
            self._paused = False
            self.__enter__()

    @override
    def __enter__(self) -> Self:
        # Torch functions do not see the arguments of a custom autograd function. Its backward runs without autocast.
        self._inputs = changing_function_inputs(
            lambda args: self._gathered(args, uncast=True) if torch.is_grad_enabled() else args
        )
        self._inputs.__enter__()
        return super().__enter__()

    @override
    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._inputs.__exit__(None, None, None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _asks(func):
            return func(*args, **kwargs)
        if torch.is_grad_enabled():
            args, kwargs = self._gathered(args), self._gathered(kwargs)
            try:
                return func(*args, **kwargs)
            except RuntimeError as error:
                names = [name for name in self._names((args, kwargs)) if name in self.found]
                if "dtype" not in str(error) or not names:
                    raise
                raise RuntimeError(
                    f"{', '.join(names)} is read outside the forward of its module, together with a tensor of another"
                    f" dtype: {error}. Cast the input there, as in F.linear(x.to(weight.dtype), weight), or call the"
                    " module, whose inputs are cast."
                ) from error
        if _gives_part(func):
            return func(*self._gathered(args), **self._gathered(kwargs))
        try:
            result = func(*args, **kwargs)  # a norm of a shard, for example, needs no gather
        except RuntimeError as error:
            if "DTensor" not in str(error):
                raise
            return func(*self._gathered(args), **self._gathered(kwargs))
        return result if _copies_or_writes(func) else self._translated(result)

    def _gathered(self, value: Any, *, uncast: bool = False) -> Any:
        if isinstance(value, nn.Parameter):
            return self._gathered_parameter(value, uncast=uncast)
        if isinstance(value, dict):
            return {key: self._gathered(inner, uncast=uncast) for key, inner in value.items()}
        if type(value) in (tuple, list):
            return type(value)(self._gathered(inner, uncast=uncast) for inner in value)
        return value

    def _translated(self, value: Any) -> Any:
        if isinstance(value, DTensor) and not isinstance(value, nn.Parameter):
            if value.device_mesh.mesh_dim_names == (TENSOR,):
                return value  # an activation, such as the sharded output of a tensor-parallel layer
            self.translates = True
            return value.full_tensor()
        if isinstance(value, tuple | list) and type(value) in (tuple, list):
            return type(value)(self._translated(inner) for inner in value)
        return value

    def _names(self, value: Any) -> list[str]:
        if isinstance(value, nn.Parameter):
            return [self._homes[value][1]] if value in self._homes else []
        inner = value.values() if isinstance(value, dict) else value if type(value) in (tuple, list) else ()
        return [name for each in inner for name in self._names(each)]

    def _gathered_parameter(self, parameter: nn.Parameter, *, uncast: bool) -> Tensor:
        if parameter not in self._homes:
            self._learn()
        home, name, handle = self._homes.get(parameter, (self._root, "", None))
        if home is self._root or home in self._running:
            # The user may have a reference to the shard from before its group was gathered.
            return handle._unsharded_param if handle is not None and parameter is handle.sharded_param else parameter
        self.found.append(name)
        whole = gather_with_root(self._root, handle, uncast=uncast)
        for alias in [p for p, (_, _, its) in self._homes.items() if its is handle]:
            self._homes[alias] = (self._root, name, handle)  # type: ignore[assignment]
        self._homes[whole] = (self._root, name, handle)  # type: ignore[assignment]
        return whole

    def _learn(self) -> None:
        for home, shard, gathered, name, handle in held_parameters(self._root):
            self._homes[shard] = (home, name, handle)
            if gathered is not None:  # created when it is first gathered
                self._homes[gathered] = (home, name, handle)

    def _follow(self, module: Any, hooks: ExitStack, *, looks_away: bool) -> None:
        called = {*sharded_in(module)} if looks_away else {module}

        def enter(*_: Any) -> None:
            if self._paused:
                return
            self.idle -= called
            self._running.append(module)
            if looks_away:
                self.__exit__(None, None, None)

        def leave(*_: Any) -> None:
            if self._paused:
                return
            if looks_away:
                self.__enter__()
            self._running.remove(module)

        hooks.callback(module.register_forward_pre_hook(enter).remove)
        hooks.callback(module.register_forward_hook(leave, always_call=True).remove)


def _asks(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return getattr(getattr(func, "__self__", None), "__name__", "") not in _VIEWS
    return name in _ASKS


def _copies_or_writes(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    return name in _COPIES or (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")


def _gives_part(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    return name in _SHAPES or (name == "__get__" and getattr(func.__self__, "__name__", "") in _VIEWS)  # type: ignore[attr-defined]
