"""Private names of Dynamo, AOTAutograd and inductor."""

import inspect
import logging
import os
import re
import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from types import FunctionType, MethodType
from typing import Any, Literal

import torch
import torch._dynamo as dynamo
import torch._functorch.config as aot_config
import torch._inductor.config as inductor_config
from torch import fx
from torch._dynamo import utils as dynamo_utils
from torch._dynamo.eval_frame import innermost_fn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._subclasses.fake_tensor import FakeTensor
from torch.compiler._cache import CacheArtifactManager, CacheInfo
from torch.nn.modules import module as modules
from torch.nn.modules.module import _global_forward_hooks as global_forward_hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_in_any_mode_without_ignore_compile_internals
from typing_extensions import override

from lightning_ups._compat.contexts import setting
from lightning_ups._compat.environment import installed
from lightning_ups._compat.patches import applied

BackendCompiler = Callable[[fx.GraphModule, list[Any]], Any]


def backends(*, debugging: bool = True) -> list[str]:
    """Return all registered backends, with or without those for ``debugging`` and experiments."""
    return list(torch.compiler.list_backends(exclude_tags=() if debugging else ("debug", "experimental")))


def takes_mode(backend: str) -> bool:
    """Return whether ``backend`` has a ``mode``, like inductor."""
    if backend == "inductor":
        return True
    parameters = inspect.signature(dynamo.lookup_backend(backend)).parameters.values()
    return any(p.name == "mode" or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def backend_compiler(backend: str, *, mode: str, dynamic: bool | None) -> BackendCompiler:
    """Return the function that ``torch.compile`` would call with each graph."""
    if backend == "inductor":
        return torch._TorchCompileInductorWrapper(mode, None, dynamic)
    options = {} if mode == "default" else {"mode": mode}
    return partial(dynamo.lookup_backend(backend), **options)


def traces_for_cuda_graphs() -> bool:
    """Return whether Dynamo currently traces for CUDA graphs, which are replayed without host code.

    A backend that is not one of torch's sets ``records_cuda_graphs``.
    """
    try:
        named: Any = InstructionTranslator.current_tx().output.compiler_fn
    except AttributeError:  # nothing is traced
        return False
    named = getattr(getattr(named, "__self__", None), "backend_compile_fn", named)  # DDP's, which splits a graph first
    named = getattr(named, "_torchdynamo_orig_backend", named)
    own = getattr(getattr(named, "compiler_fn", named), "records_cuda_graphs", None)
    if own is not None:
        return bool(own)
    if isinstance(named, torch._TorchCompileInductorWrapper):
        return bool(named.config.get("triton.cudagraphs", inductor_config.triton.cudagraphs))
    return getattr(named, "compiler_name", None) == "cudagraphs"


def is_off() -> str | None:
    """Return the setting by which the user has turned compilation off in this process, or None."""
    for name in ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"):
        if os.environ.get(name) == "1":
            return f"{name}=1"
    return "torch._dynamo.config.disable" if dynamo.config.disable else None


def is_watched() -> bool:
    """Return whether a dispatch mode, such as a counter, must see each operation: Dynamo then does not run."""
    return is_in_any_mode_without_ignore_compile_internals()


def configuration() -> Hashable:
    """Return a key of all settings that affect how a graph is compiled."""
    return aot_config.get_hash(), inductor_config.get_hash()


def recompile_limit() -> int:
    """Return how many graphs a code object may have before Dynamo silently runs it uncompiled."""
    return dynamo.config.recompile_limit


def num_graphs(function: Callable[..., Any]) -> int:
    """Return the number of graphs of ``function``, which ``torch.compile`` returned."""
    # Not a counter of new graphs: a second fit in the process compiles none, and still runs compiled.
    code = function._torchdynamo_orig_callable.__code__  # type: ignore[attr-defined]
    return len(dynamo.eval_frame._debug_get_cache_entry_list(code))


def compiled_by_itself(module: torch.nn.Module) -> bool:
    """Return whether ``torch.compile(module)`` made ``module``, or ``module.compile()`` was called."""
    return isinstance(module, dynamo.eval_frame.OptimizedModule) or module._compiled_call_impl is not None


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """One attempt of Dynamo to compile a code object; if ``code`` is None, a later event.

    Args:
        code: The name of the code object.
        frame: Dynamo's number of the code object.
        guard: The guard that failed in existing graphs; None if there were none. It is that of the newest graph or,
            under ``telling_guards_first``, the newest one that is more than a switch.
        failure: Why there is no graph, or None.
        hit_limit: Whether it failed because there were too many graphs.
        seconds: The duration.
        no_cuda_graph: Why inductor made no CUDA graph, or None.
        operators: The number of operators in the graph.
    """

    code: str | None
    frame: str
    guard: str | None
    failure: str | None
    hit_limit: bool
    seconds: float
    no_cuda_graph: str | None
    operators: int = 0


# A point in this process's history of compilations: the last one, and the number of graph breaks.
Mark = tuple[Any, int]


def mark() -> Mark:
    """Return the current point."""
    metrics = dynamo_utils._compilation_metrics  # inlined, because it runs in every call of compiled code
    return (metrics[-1] if metrics else None), len(dynamo_utils.graph_break_reasons)


def compiled_since(start: Mark) -> bool:
    """Return whether Dynamo has tried to compile anything since ``start``; cheap enough for every call."""
    metrics = dynamo_utils._compilation_metrics
    return (metrics[-1] if metrics else None) is not start[0]


def without_disabling(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function inside of ``torch._dynamo.disable``, for a caller that Dynamo wraps in the same way."""
    return innermost_fn(function)


def compilations_since(start: Mark) -> tuple[list[Compilation], list[str]]:
    """Return the compilations since ``start``, and the reasons of their graph breaks."""
    breaks = dynamo_utils.graph_break_reasons[start[1] :]
    return [_compilation(metrics) for metrics in _metrics_since(start)], [_break(reason) for reason in breaks]


def is_compiler_error(error: Exception, start: Mark) -> bool:
    """Return whether ``error`` was raised during a compilation since ``start``, and not during execution."""
    if isinstance(error, (TorchDynamoException, FailOnRecompileLimitHit)):
        return True
    # Dynamo passes on an assertion or an index error of its own unchanged.
    if any(metrics.fail_type == type(error).__qualname__ for metrics in _metrics_since(start)):
        return True
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback is not None and traceback.tb_frame.f_globals.get("__name__", "").startswith("torch._dynamo.")


def _metrics_since(start: Mark) -> list[Any]:
    new: list[Any] = []
    for metrics in reversed(dynamo_utils._compilation_metrics):
        if metrics is start[0]:
            break
        new.append(metrics)
    return new[::-1]


def _compilation(metrics: Any) -> Compilation:
    failure, guard = metrics.fail_reason, metrics.recompile_reason
    return Compilation(
        code=metrics.co_name,
        frame=(metrics.compile_id or "").rpartition("/")[0],
        guard=None if guard is None else _without_graph(guard),
        failure=None if failure is None else f"{_first_line(failure)}{_failed_at(metrics)}{first_hint(failure)}",
        hit_limit="recompile limit exceeded" in (failure or "") or metrics.fail_type == "FailOnRecompileLimitHit",
        seconds=metrics.entire_frame_compile_time_s or 0.0,
        no_cuda_graph=metrics.cudagraph_skip_reason,
        operators=metrics.graph_op_count or 0,
    )


def _failed_at(metrics: Any) -> str:
    file, line = metrics.fail_user_frame_filename, metrics.fail_user_frame_lineno
    return f" ({os.path.basename(file)}:{line})" if file and is_of_user(file) else ""


def _break(reason: Any) -> str:
    lines = [line for line in reason.reason.splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].rstrip().endswith(":"):  # "Encountered graph break when attempting to trace ...:"
        del lines[0]
    where = next((frame for frame in reversed(reason.user_stack or ()) if is_of_user(frame.filename)), None)
    place = f" ({os.path.basename(where.filename)}:{where.lineno})" if where is not None else ""
    return f"{_first_line(lines[0]) if lines else 'no reason given'}{place}{first_hint(reason.reason)}"


def has_forward_hooks(module: torch.nn.Module) -> bool:
    """Return whether a hook is given what the forward of ``module`` returns."""
    return bool(module._forward_hooks or global_forward_hooks)


def hooks_of_all_modules() -> list[dict[int, Any]]:
    """Return the hooks that run around each module of the process."""
    places = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
    return [getattr(modules, f"_global_{place}") for place in places]


def lacks_compiler(text: str) -> bool:
    """Return whether ``text``, of an error, says that inductor found no C++ compiler."""
    return "InvalidCxxCompiler" in text


def first_hint(text: str) -> str:
    """Return Dynamo's first hint that says what to do, preceded by a full stop, or an empty string."""
    if lacks_compiler(text):  # Inductor's, which gives no hint
        return ". Hint: install a C++ compiler, such as by apt-get install g++, or leave Compile out"
    hints = [line.strip() for line in text.splitlines() if line.strip().startswith("Hint: ")]
    return next((f". {hint}" for hint in hints if "is fundamental" not in hint and "report an issue" not in hint), "")


def is_of_user(file: str) -> bool:
    """Return whether ``file`` is neither torch's own nor one of those that replace a forward."""
    return not file.startswith((_TORCH, _OURS))


_TORCH = os.path.join(os.path.dirname(torch.__file__), "")
_OURS = os.path.join(os.path.dirname(os.path.dirname(__file__)), "transforms", "")


def _first_line(text: str) -> str:
    # Dynamo pads its guards with the source line that created them, and appends hints and stacks.
    return " ".join(text.strip().partition("\n")[0].partition("  # ")[0].split())


def telling_guards_first() -> AbstractContextManager[None]:
    """Let Dynamo report the most informative of the failed guards, while the context is open.

    Each existing graph has a failed guard, and Dynamo reports that of the newest. If a function is called alternately
    with inputs that need gradients and with others, the newest guard only reports that difference.
    """
    target = "torch._dynamo.convert_frame:get_and_maybe_log_recompilation_reasons"
    return applied(target, _sorted_by_what_they_tell, once=True)


def comparing_forwards_by_function() -> AbstractContextManager[None]:
    """Let Dynamo identify a forward on an instance by its function, while the context is open.

    Dynamo does so for methods, and treats any other callable as unique: modules within equal blocks, whose forwards
    share one function but are bound to one module each, would get a graph for each block.
    """
    target = "torch._dynamo.variables.nn_module:guard_to_detect_forward_monkeypatching"
    return applied(target, _guarding_the_function, once=True)


def _guarding_the_function(guard: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(guard)
    def guard_the_function(source: Any, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        forward = vars(module).get("forward")
        if (
            source is None
            or type(forward) is MethodType
            or not isinstance(getattr(forward, "__func__", None), FunctionType)
        ):
            guard(source, module, *args, **kwargs)
            return
        place = AttrSource(source, "forward")
        install_guard(place.make_guard(GuardBuilder.TYPE_MATCH))
        install_guard(AttrSource(place, "__func__").make_guard(GuardBuilder.CLOSURE_MATCH))

    return guard_the_function


def _sorted_by_what_they_tell(get: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(get)
    def get_sorted(*args: Any, **kwargs: Any) -> Any:
        guards = get(*args, **kwargs)
        known = isinstance(guards, list) and all(isinstance(guard, str) for guard in guards)
        return sorted(guards, key=_tells_little) if known else guards

    return get_sorted


def _without_graph(guard: str) -> str:
    # The guard starts with the number of its graph, which would make equal guards look different.
    return re.sub(r"^[!\d/_]+: ", "", _first_line(guard))


GuardKind = Literal["shape", "value", "gradients", "other"]


def guard_kind(guard: str) -> GuardKind:
    """Return what has changed when ``guard`` fails: a tensor's shape, whether it needs gradients, or a value."""
    for kind, words in _KINDS:
        if words.search(guard):
            return kind
    return "other"


_KINDS: list[tuple[GuardKind, re.Pattern[str]]] = [  # the first match
    ("gradients", re.compile(r"requires_grad mismatch")),
    ("shape", re.compile(r"(size|stride|rank) mismatch|\.(size|stride|storage_offset)\(\)")),
    ("other", re.compile(r"^(tensor '|GLOBAL_STATE|BACKEND_MATCH|Unexpected|Unable|Cache line)")),
    ("value", re.compile(r" ([=!]=|[<>]=?|is|in|not in) |___|^expected type of ")),
]
_SWITCH = re.compile(r"GLOBAL_STATE|dispatch key set mismatch|\.training == ")  # evaluation, autocast


def _tells_little(guard: str) -> int:
    guard = _without_graph(guard)
    # a parameter was frozen, not a change between calls
    if guard_kind(guard) == "gradients" and "_parameters[" not in guard:
        return 2
    return 1 if _SWITCH.search(guard) else 0


def cache_hits() -> tuple[int, int]:
    """Return how many graphs of this process came from inductor's caches, and how many did not."""
    counters = dynamo_utils.counters["inductor"]
    return counters["fxgraph_cache_hit"], counters["fxgraph_cache_miss"]


def backward_compiled_with_forward() -> AbstractContextManager[Any]:
    """Return a context in which a graph's backward is compiled with its forward, not when it first runs."""
    return setting(aot_config, "force_non_lazy_backward_lowering", value=True)


def donated_buffers_off() -> AbstractContextManager[Any]:
    """Let graphs compiled in this context run backward again after ``retain_graph=True``.

    Otherwise their first backward overwrites the memory of saved tensors.
    """
    return setting(aot_config, "donated_buffer", value=False)


def errors_left_to_python() -> AbstractContextManager[Any]:
    """Let Dynamo run a function uncompiled in this context if it fails to trace it, instead of raising."""
    return setting(dynamo.config, "suppress_errors", value=True)


def ddp_splitting_off() -> AbstractContextManager[Any]:
    """Keep Dynamo from splitting graphs at DDP's bucket boundaries while the context is open."""
    return setting(dynamo.config, "optimize_ddp", value=False)


@contextmanager
def guarding_each_parameter() -> Iterator[None]:
    """Let graphs compiled in this context check each parameter at every call, including `requires_grad`.

    Torch 2.11 skips these checks while the dict that holds a parameter is unchanged. A graph compiled while a parameter
    was frozen would then still be used after it was unfrozen, and give it no gradient.
    """
    of_dicts = setting(dynamo.config, "skip_tensor_guards_with_matching_dict_tags", value=False)
    with of_dicts, setting(dynamo.config, "use_recursive_dict_tags_for_guards", value=False):
        yield


@contextmanager
def loggers_left_out(tell: Callable[[], None]) -> Iterator[None]:
    """Let Dynamo leave out calls of Python's loggers, which would break graphs.

    Args:
        tell: Called when this happens for the first time.
    """
    # Libraries add their own methods, such as `warning_once` of transformers.
    methods = [method for name, method in vars(logging.Logger).items() if name.partition("_")[0] in _LEVELS]
    left_out = _LeftOut({*dynamo.config.ignore_logging_functions, *methods})
    left_out.tell = tell
    with setting(dynamo.config, "ignore_logging_functions", left_out):
        yield


_LEVELS = ("debug", "info", "warning", "error", "exception", "critical", "log")


class _LeftOut(set[Any]):
    """A set that reports, once, that something was found in it.

    Torch 2.11 writes a sorted copy of it as JSON when it records a compilation: the copy contains names.
    """

    tell: Callable[[], None] | None = None

    @override
    def __iter__(self) -> Iterator[str]:
        return iter([getattr(function, "__qualname__", repr(function)) for function in super().__iter__()])

    @override
    def __reduce__(self) -> Any:
        return type(self), ([*super().__iter__()],)

    @override
    def __contains__(self, function: object) -> bool:
        found = super().__contains__(function)
        if found and self.tell is not None:
            tell, self.tell = self.tell, None
            tell()
        return found


def is_fake(value: Any) -> bool:
    """Return whether ``value`` is a fake tensor, as compilers use."""
    return isinstance(value, FakeTensor)


def is_static(placeholder: fx.Node) -> bool:
    """Return whether this input of a graph is a parameter or a buffer, whose address a CUDA graph may read."""
    return bool(placeholder.meta.get("tensor_dict", {}).get("_dynamo_static_input_type"))


def is_written_to(placeholder: fx.Node) -> bool:
    """Return whether Dynamo saw an in-place write to this input of a graph."""
    example = placeholder.meta.get("example_value")
    # A fake tensor is created for the graph, so its version counts only the graph's own writes.
    return isinstance(example, torch.Tensor) and example._version > 0


def tree_map(function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """Return ``tree`` with ``function`` applied to each of its tensors."""
    return pytree.tree_map_only(torch.Tensor, function, tree)


def toolchain() -> dict[str, str | None]:
    """Return the versions on which a compiled program depends."""
    return {
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "torch": str(torch.__version__),
        "triton": installed("triton"),
        "cuda": torch.version.cuda,
    }


def has_new_artifacts() -> bool:
    """Return whether compiled programs were created, or found in a cache, since they were last saved."""
    return CacheArtifactManager.need_serialize()


def artifact_keys(info: CacheInfo) -> set[tuple[str, str]]:
    """Return the kind and key of each entry of ``info``."""
    return {(kind, key) for kind, keys in info.artifacts.items() for key in keys}


def load_artifacts(programs: bytes) -> set[tuple[str, str]] | None:
    """Add compiled programs to the caches, so that they are also saved again; None if they cannot be read."""
    artifacts = CacheArtifactManager.deserialize(programs)
    if artifacts is None:
        return None
    # Otherwise a run that uses few of them would save only those few.
    for kind, loaded in artifacts.items():
        for artifact in loaded:
            if artifact not in CacheArtifactManager._seen_artifacts:
                CacheArtifactManager._seen_artifacts.add(artifact)
                CacheArtifactManager._new_cache_artifacts[kind].append(artifact)
    return artifact_keys(CacheArtifactManager.populate_caches(artifacts))
