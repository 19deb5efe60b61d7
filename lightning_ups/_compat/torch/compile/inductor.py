"""Settings of inductor that have no public name, each held while a context is open."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from torch import fx

from lightning_ups._compat.patches import applied

__all__ = [
    "combined_kernels",
    "eager_precision_casts",
    "eager_random_numbers",
    "even_splits",
    "graph_pass",
    "known_by",
    "known_to_caches",
    "passes_in",
    "tuned_blocks",
]

GraphKind = Literal["joint", "apart"]

_ALIGNED = 16  # elements of two bytes: more than the widest load takes


@contextmanager
def combined_kernels() -> Iterator[None]:
    """Let small kernels that do not wait for one another, such as maxima of weights, be launched as one."""
    with _set("combo_kernels"):
        yield


@contextmanager
def eager_precision_casts() -> Iterator[None]:
    """Let compiled code round between operations where eager code does.

    Without it a value that is recomputed can differ from the one that was rounded, and scales of rows computed from the
    two disagree: losses become NaN (pytorch#150859).
    """
    with _set("emulate_precision_casts"):
        yield


@contextmanager
def eager_random_numbers() -> Iterator[None]:
    """Let compiled code draw the random numbers that eager code would."""
    with _set("fallback_random"):
        yield


@contextmanager
def even_splits() -> Iterator[None]:
    """Let a reduction of much to one value be split into pieces of one size, each of which begins aligned.

    By itself inductor splits by the device alone: 2**27 elements become 528 pieces of 254201. Each element of such a
    piece is loaded by itself, and asked first whether it is there.
    """
    with applied("torch._inductor.choices:InductorChoices.reduction_split_factor", _splitting_evenly, once=True):
        yield


def _splitting_evenly(split: Callable[..., int]) -> Callable[..., int]:
    parameters = inspect.signature(split)

    def reduction_split_factor(*args: Any, **kwargs: Any) -> int:
        call = parameters.bind(*args, **kwargs).arguments
        found = split(*args, **kwargs)
        return _evenly(found, call["reduction_numel_hint"]) if call["inner_reduction"] else found

    return reduction_split_factor


def _evenly(splits: int, size: int) -> int:
    """Return the number nearest to ``splits``, at most twice or half of it, that splits ``size`` evenly and aligned."""
    if splits == 1 or size % (splits * _ALIGNED) == 0:
        return splits
    near = (n for n in range(max(splits // 2, 2), 2 * splits + 1) if size % (n * _ALIGNED) == 0)
    return min(near, key=lambda n: abs(n - splits), default=splits)


@contextmanager
def graph_pass(when: GraphKind, change: Callable[[fx.Graph], None], *, sources: Sequence[str] = ()) -> Iterator[None]:
    """Let ``change`` work on graphs before inductor's own passes do, after a pass that is set already.

    Args:
        when: ``"joint"``: on graphs of forward and backward in one; ``"apart"``: on those of each.
        change: What alone decides on the result, by its module's code: inductor's caches know it by that.
        sources: Files of whatever else decides on it.
    """
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    name = {"joint": "joint_custom_pre_pass", "apart": "post_grad_custom_pre_pass"}[when]
    before, source = passes_in(getattr(config, name)), inspect.getfile(change)

    class Pass(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            for each in before:
                each(graph)
            change(graph)

        def uuid(self) -> Any:
            if (others := known_by(before)) is None:
                return None  # no caching, as without ours
            return get_hash_for_files((source, *sources)), change.__name__, others

    with _set(name, Pass()):
        yield


def passes_in(setting: Any) -> list[Any]:
    """Return the passes that a setting of inductor's holds: none, one or several."""
    return [] if setting is None else [*setting] if isinstance(setting, (list, tuple)) else [setting]


def known_by(passes: Iterable[Any]) -> tuple[Any, ...] | None:
    """Return what inductor's caches know ``passes`` by, or None if they do not know one of them."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    keys = tuple(each.uuid() if isinstance(each, CustomGraphPass) else None for each in passes)
    return None if None in keys else keys


@contextmanager
def known_to_caches(*functions: Callable[..., Any], sources: Sequence[str]) -> Iterator[None]:
    """Let graphs that call ``functions``, which `torch.compiler.allow_in_graph` left whole, be found in caches.

    By itself torch traces and differentiates such a graph in each start anew, since it cannot know what they do.

    Args:
        functions: Those.
        sources: Files of what they do: caches know them by their content.
    """
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import get_hash_for_files

    name = "unsafe_marked_cacheable_functions"
    if not hasattr(config, name):
        yield
        return
    key = get_hash_for_files(tuple(sources)).hex()
    ours = {f"{function.__module__}.{function.__name__}": key for function in functions}
    with _set(name, {**getattr(config, name), **ours}):
        yield


@contextmanager
def tuned_blocks() -> Iterator[None]:
    """Let compiled code try more sizes of the blocks in which a kernel goes through its data, which takes minutes."""
    with _set("coordinate_descent_tuning"):
        yield


@contextmanager
def _set(name: str, value: Any = True) -> Iterator[None]:  # noqa: FBT002
    from torch._inductor import config  # which takes its time to import

    # What is set holds in this thread alone, and a backward may be compiled in one of autograd's: these see defaults.
    entry = config._config[name]  # pyright: ignore[reportAttributeAccessIssue]
    before = entry.default
    with config.patch({name: value}):
        entry.default = value
        try:
            yield
        finally:
            entry.default = before
