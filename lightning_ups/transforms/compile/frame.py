"""Functions that Dynamo compiles for equal blocks, each with a code object, and with that a limit, of its own."""

import sys
from collections import OrderedDict
from collections.abc import Callable, Container, Hashable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, cached_property
from itertools import count
from types import CodeType, FunctionType
from typing import Any, Literal, get_args

import torch
from torch import fx, nn

from lightning_ups._compat.contexts import ThreadStack
from lightning_ups._compat.torch.compile import dynamo
from lightning_ups._compat.torch.compile.cudagraph_trees import Demand, recorded_on_demand
from lightning_ups.transforms.compile.alike_hooks import hooks_of
from lightning_ups.transforms.compile.gain import is_small
from lightning_ups.transforms.compile.trial import Caller, GraphError, Run, drawing, with_trial
from lightning_ups.transforms.forward import Forward

Prepare = Callable[[fx.GraphModule], str | None]
Mode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]

_USUAL_BACKENDS = ("inductor", "aot_eager", "eager", "cudagraphs")


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiler:
    """The arguments of ``torch.compile``.

    Args:
        backend: The name of a registered backend.
        mode: One of inductor's modes.
        dynamic: Whether sizes may vary. None: from the second size on.
        fullgraph: Whether a graph break is an error.
        on_demand: Whether the CUDA graphs of the mode are replayed only where a caller has a slot for them. Other calls
            run as without CUDA graphs.
        leaves_small: Whether graphs that are too small to gain run as they were captured.
        draws: Whether graphs may draw random numbers. Inductor draws others than the code that it compiles.

    Raises:
        ValueError: If there is no such backend or mode, or if the backend has no modes.
    """

    backend: str = "inductor"
    mode: Mode = "default"
    dynamic: bool | None = None
    fullgraph: bool = False
    on_demand: bool = False
    leaves_small: bool = False
    draws: bool = True

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ValueError(
                f"mode={self.mode!r} is not a known choice."
                " A mode trades the time to compile for the time to run."
                f" Use one of {get_args(Mode)}."
            )
        if self.backend not in dynamo.backends():
            known = tuple(dict.fromkeys((*_USUAL_BACKENDS, *dynamo.backends(debugging=False))))
            near = get_close_matches(str(self.backend), known, n=1)
            raise ValueError(
                f"backend={self.backend!r} is not registered with torch.compile."
                " A backend has a name once the package that brings it is installed or has registered it."
                f" Use one of {known}{f'; the nearest is {near[0]!r}' if near else ''}."
            )
        if self.mode != "default" and not dynamo.takes_mode(self.backend):
            raise ValueError(
                f"mode={self.mode!r} is given with backend={self.backend!r}."
                " Modes are settings of inductor, and this backend takes none."
                " Leave mode out, or use backend='inductor'."
            )

    @property
    def cuda_graphs(self) -> bool:
        """Whether the work of a GPU is recorded once and then replayed, in memory that the recording owns."""
        return not self.on_demand and (self.backend == "cudagraphs" or self.mode in ("reduce-overhead", "max-autotune"))


class Frame:
    """A function for Dynamo to compile, and what came of it in this process.

    Args:
        inner: What the function calls with its arguments.
        compiler: How to compile it.
        name: The name of its code, unique in the process.
        prepares: Change its graphs before the backend sees them.
    """

    def __init__(self, inner: Forward, compiler: Compiler, name: str, prepares: "tuple[Prepare, ...]" = ()) -> None:
        self.name, backend = name, _backend(compiler, prepares)
        self.run: Callable[..., Any] = torch.compile(
            own_code(inner, name), backend=backend, dynamic=compiler.dynamic, fullgraph=compiler.fullgraph
        )
        self.forget()

    def forget(self) -> None:
        """Start anew, as after ``torch.compiler.reset()``."""
        self.graphs = 0
        self.small_graphs = 0  # of these, those that run as they were captured, too small to gain
        self.cache_hits = 0
        self._operators: dict[str, int] = {}  # in the newest graph of each code object
        self.seconds = 0.0
        self.breaks: list[str] = []
        self.recompiles: list[str] = []  # the guard that failed, once for each call that compiled again
        self.failures: list[str] = []
        self.no_cuda_graphs: list[str] = []
        self.askers: list[str] = []  # the blocks whose calls made a graph
        self.full = False  # Dynamo has met its limit here, and compiles nothing more, whatever the call
        self.full_inside = False  # the same for a function that it calls after a graph break
        self._number: str | None = None  # by which Dynamo knows the code
        self._kinds: set[Hashable] = set()

    @property
    def num_compiled(self) -> int:
        """How many variants of the function Dynamo has compiled and keeps."""
        return dynamo.num_graphs(self.run)

    @property
    def has_graph(self) -> bool:
        """Whether anything of the function runs as a graph."""
        return self.graphs > 0 and self.num_compiled > 0

    @property
    def operators(self) -> int:
        """The number of operators in its graphs, each counted once however often it was compiled."""
        return sum(self._operators.values())

    @property
    def differ(self) -> bool:
        """Whether each new graph was for another block: they only look equal."""
        return len(self.askers) > 1 and len(set(self.askers)) > len(self.askers) // 2

    def learn(self, start: dynamo.Mark, *, asker: str, kind: Hashable) -> None:
        """Take account of what was compiled since ``start`` in a call of the block ``asker``.

        Args:
            start: The moment before the call.
            asker: The name of the block.
            kind: What Dynamo tells apart by intention, such as training and evaluation.
        """
        compilations, breaks = dynamo.compilations_since(start)
        self.breaks += breaks
        for compilation in compilations:
            self.seconds += compilation.seconds
            self._operators[compilation.frame] = compilation.operators
            if compilation.code == self.name:
                self._number = compilation.frame
                self.askers.append(asker)
            if compilation.failure is not None:
                self.failures.append(compilation.failure)
            if compilation.no_cuda_graph is not None:
                self.no_cuda_graphs.append(compilation.no_cuda_graph)
            if compilation.hit_limit and compilation.frame == self._number:
                self.full = True
            elif compilation.hit_limit:
                self.full_inside = True
        guards = [compilation.guard for compilation in compilations if compilation.guard is not None]
        if guards and kind in self._kinds:
            self.recompiles.append(guards[0])
        self._kinds.add(kind)


def frame_of(
    inner: Forward, module: nn.Module, compiler: Compiler, *, name: str, alone: bool, phase: str = "training"
) -> Frame:
    """Return the frame that ``module`` shares with equal modules, now and in later fits.

    Args:
        inner: What it calls.
        module: The first argument of these calls.
        compiler: How to compile it.
        name: The name of the module.
        alone: Whether to share the frame only with a module of this name in later fits.
        phase: In which calls the frame is used. Evaluation has one of its own: the many graphs that it may need, as
            where it generates text, must leave room for those of training.
    """
    alike = (structure(module), dynamo.configuration(), name if alone else None, phase)
    for generation in count():
        frame = _frame(inner, compiler, type(module).__name__, tuple(_PREPARING.values), *alike, generation)
        if frame.num_compiled == 0:
            frame.forget()
        if not frame.full:
            return frame
        if frame.differ:
            return frame_of(inner, module, compiler, name=name, alone=True, phase=phase)
    raise AssertionError("count() does not end")


@cache  # equal blocks share a frame by it
def only_loss(inner: Forward) -> Forward:
    """Return a forward that calls ``inner``, and of outputs as models of transformers have them returns the loss."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        outputs = inner(self, *args, **kwargs)
        # Of a class whose first field is the loss, all fields may be left out.
        if isinstance(outputs, OrderedDict) and [*outputs.keys()][:1] == ["loss"]:
            return type(outputs)(loss=outputs["loss"])
        return outputs

    return forward


def structure(module: nn.Module) -> Hashable:
    """Return what must be the same in two modules of one class for them to share graphs.

    Dynamo makes a graph for each shape of a parameter and for each value of an attribute that the forward reads, and
    gives up after eight. Hence classes, parameters, and attributes such as a rate or a switch are compared. Integers
    are not: the index of a layer is mostly there for the cache, and differs between blocks that are equal otherwise.
    Nor is what only gives weights their first values, such as a spread that falls with depth.
    The forward of ``module`` itself is left out: frames have it as ``inner``, and it may be replaced meanwhile. So are
    its own hooks, which run around what is compiled.
    """
    return tuple(
        (name, type(m), _tensors(m), *((_forward(m), hooks_of(m)) if name else ()), *_attributes(m))
        for name, m in module.named_modules()
    )


def _tensors(module: nn.Module) -> Hashable:
    named = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return tuple(
        (name, type(t), None if nn.parameter.is_lazy(t) else t.shape, t.dtype, t.requires_grad) for name, t in named
    )


def _forward(module: nn.Module) -> Hashable:
    forward = vars(module).get("forward")
    return getattr(forward, "__func__", forward)


def _attributes(module: nn.Module) -> list[tuple[str, Hashable]]:
    own = vars(module)
    read = own if "forward" in own else _names_read(type(module))  # a forward of its own may read anything
    values = {k: v for k, v in own.items() if type(v) in (float, bool, str, torch.dtype) and k != "training"}
    return sorted((name, value) for name, value in values.items() if name in read)


@cache
def _names_read(kind: type) -> frozenset[str]:
    """Return the names in the code of ``kind`` and of the files that it is from, initialisation apart."""
    kinds = [base for base in kind.__mro__ if base not in (nn.Module, object)]
    files = {base.__module__: getattr(sys.modules.get(base.__module__), "__dict__", {}) for base in kinds}
    places = [*map(vars, kinds), *files.values()]
    places += [vars(each) for file in files.values() for each in file.values() if _is_helper(each, files)]
    read = [value for place in places for name, value in place.items() if not _initialises(name)]
    return frozenset(name for value in read for code in _codes_of(value) for name in _names_in(code))


def _is_helper(value: Any, files: Container[str]) -> bool:
    # Another module reads what is its own.
    return isinstance(value, type) and value.__module__ in files and not issubclass(value, nn.Module)


def _initialises(name: str) -> bool:
    return name.lstrip("_").startswith(("init", "reset")) or name in ("extra_repr", "__repr__")


def _codes_of(value: Any, *, depth: int = 3) -> Iterator[CodeType]:
    """Yield the code of a function, and of those that it decorates."""
    if isinstance(value, property):
        value = value.fget
    elif isinstance(value, staticmethod | classmethod):
        value = value.__func__
    elif isinstance(value, cached_property):
        value = value.func
    if not isinstance(value, FunctionType):
        return
    yield value.__code__
    if depth:
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # an empty one
                yield from _codes_of(cell.cell_contents, depth=depth - 1)


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):  # as in getattr(self, "scale")
            yield constant
        elif isinstance(constant, CodeType):
            yield from _names_in(constant)


_NUMBERS = count()


@cache  # equal modules and later fits get the same frame, and with it the graphs that it already has
def _frame(inner: Forward, compiler: Compiler, kind: str, prepares: tuple[Prepare, ...], *alike: Hashable) -> Frame:  # noqa: ARG001
    return Frame(inner, compiler, own_name(f"{kind}_forward"), prepares)


def own_name(function: str) -> str:
    """Return a name for ``function`` that no other has in this process."""
    return f"{function}_{next(_NUMBERS)}"


def own_code(inner: Forward, name: str) -> Forward:
    """Return a function that calls ``inner``, with a code object of its own, called ``name``."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return inner(self, *args, **kwargs)

    # Dynamo skips torch's own frames, hence a frame of ours; and it keeps its graphs, and its limit of
    # recompilations, by code object, hence a code object that no other class shares.
    code = forward.__code__.replace(co_name=name, co_qualname=name)
    return FunctionType(code, globals(), name, None, forward.__closure__)


_PREPARING: ThreadStack[Prepare] = ThreadStack()
_HEARING: ThreadStack[Callable[[str], None]] = ThreadStack()


def prepared(prepare: Prepare) -> AbstractContextManager[None]:
    """Let ``prepare`` change each graph of the blocks that are compiled in this context, before a backend sees it.

    Only blocks with equal ``prepare`` share graphs, so it must be hashable. Each time a graph runs, `hearing` passes on
    the text that ``prepare`` has returned for it.
    """
    return _PREPARING.holding(prepare)


def hearing(hear: Callable[[str], None]) -> AbstractContextManager[None]:
    """Call ``hear`` with what there is to say of each graph that runs in this thread, while the context is open."""
    return _HEARING.holding(hear)


def _saying(run: Callable[..., Any], said: str) -> Callable[..., Any]:
    def saying(*args: Any) -> Any:
        for hear in _HEARING.values:
            hear(said)
        return run(*args)

    return saying


_CALLERS: ThreadStack[Caller] = ThreadStack()


class calling:  # noqa: N801  (a context manager without a generator, since it is entered at each call of a block)
    """Whatever this thread compiles or runs in this context is on behalf of ``caller``."""

    __slots__ = ("_caller",)

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    def __enter__(self) -> None:
        _CALLERS.values.append(self._caller)

    def __exit__(self, *error: object) -> None:
        _CALLERS.values.pop()


def _caller() -> Caller | None:
    return _CALLERS.innermost


def _replayed_or(launched: Run, run: Run, graph: fx.GraphModule, demand: Demand) -> Run:
    """Return a function that runs ``launched``, or ``run`` where the caller has a slot for it."""

    def run_in_slot(*args: Any) -> Any:
        caller = _caller()
        assert caller is not None
        assert caller.slot is not None
        return caller.slot.run(run, args)

    replayed = with_trial(run_in_slot, graph, caller=_caller)

    def replayed_or_launched(*args: Any) -> Any:
        caller = _caller()
        if caller is None or caller.is_settled or not caller.takes_slot(graph, demand):
            return launched(*args)
        return replayed(*args)

    return replayed_or_launched


class _Backend:
    """What Dynamo calls with each graph of our frames, and of the functions that they call after a graph break."""

    def __init__(self, compiler: Compiler, prepares: tuple[Prepare, ...]) -> None:
        self._prepares = prepares
        self.__name__ = self.compiler_name = compiler.backend
        self._compile = dynamo.backend_compiler(compiler.backend, mode=compiler.mode, dynamic=compiler.dynamic)
        self._on_demand, self._leaves_small, self._draws = compiler.on_demand, compiler.leaves_small, compiler.draws
        self.records_cuda_graphs = compiler.cuda_graphs  # by which kernels of attention may be chosen

    def __call__(self, graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        if self._leaves_small and is_small(graph) and (caller := _caller()) is not None:
            caller.left_small_graph()
            return graph.forward
        if not self._draws and (name := drawing(graph)) is not None:
            raise GraphError(f"it draws random numbers, by {name}")
        said = "; ".join(filter(None, [prepare(graph) for prepare in self._prepares]))
        demand = Demand() if self._on_demand else None
        with (
            # So that what fails, fails in the call of its block, however late the backward runs.
            dynamo.backward_compiled_with_forward() if torch.is_grad_enabled() else nullcontext(),
            nullcontext() if demand is None else recorded_on_demand(demand),
        ):
            hits, misses = dynamo.cache_hits()
            run = dynamo.without_disabling(self._compile(graph, inputs))
        if caller := _caller():
            caller.made_graph(from_cache=dynamo.cache_hits() > (hits, misses) and dynamo.cache_hits()[1] == misses)
        launched = with_trial(run, graph, caller=_caller)
        run = launched if demand is None else _replayed_or(launched, run, graph, demand)
        return _saying(run, said) if said else run

    def reset(self) -> None:
        if reset := getattr(self._compile, "reset", None):
            reset()


@cache  # Dynamo uses a graph again only for the backend that made it
def _backend(compiler: Compiler, prepares: tuple[Prepare, ...]) -> _Backend:
    return _Backend(compiler, prepares)
