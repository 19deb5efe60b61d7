"""Settings of inductor without public names, each set while a context is open."""

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal

from torch import fx

from lightning_ups._compat.contexts import setting
from lightning_ups._compat.patches import applied

GraphKind = Literal["joint", "apart"]

_ALIGNED = 16  # elements of two bytes: more than the widest load


_FOLDERS = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def chosen_cache_folder() -> str | None:
    """Return the folder of compiled programs that the environment names; inductor also sets the variables itself."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    default = default_cache_dir()
    values = (os.environ.get(name) for name in _FOLDERS)
    return next((value for value in values if value and value not in (default, os.path.join(default, "triton"))), None)


@contextmanager
def cache_folder(folder: Path) -> Iterator[None]:
    """Keep compiled programs in ``folder`` while the context is open."""
    before = {name: os.environ.pop(name, None) for name in _FOLDERS}
    os.environ[_FOLDERS[0]] = str(folder)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def combined_kernels() -> AbstractContextManager[None]:
    """Launch independent small kernels, such as maxima of weights, as one kernel."""
    return _set("combo_kernels")


def eager_precision_casts() -> AbstractContextManager[None]:
    """Round between operations in compiled code as in eager code.

    Otherwise a recomputed value can differ from the rounded one, and scales of rows computed from the two disagree:
    losses become NaN (pytorch#150859).
    """
    return _set("emulate_precision_casts")


def eager_random_numbers() -> AbstractContextManager[None]:
    """Draw the same random numbers in compiled code as in eager code."""
    return _set("fallback_random")


def even_splits() -> AbstractContextManager[None]:
    """Split large reductions to one value into equal pieces with aligned starts.

    Inductor's default depends only on the device: 2**27 elements become 528 pieces of 254201. Such a piece is loaded
    element by element, each with a bounds check.
    """
    return applied("torch._inductor.choices:InductorChoices.reduction_split_factor", _splitting_evenly, once=True)


def _splitting_evenly(split: Callable[..., int]) -> Callable[..., int]:
    parameters = inspect.signature(split)

    def reduction_split_factor(*args: Any, **kwargs: Any) -> int:
        call = parameters.bind(*args, **kwargs).arguments
        found = split(*args, **kwargs)
        return _evenly(found, call["reduction_numel_hint"]) if call["inner_reduction"] else found

    return reduction_split_factor


def _evenly(splits: int, size: int) -> int:
    """Return the number closest to ``splits``, within a factor of two, that splits ``size`` evenly and aligned."""
    if splits == 1 or size % (splits * _ALIGNED) == 0:
        return splits
    near = (n for n in range(max(splits // 2, 2), 2 * splits + 1) if size % (n * _ALIGNED) == 0)
    return min(near, key=lambda n: abs(n - splits), default=splits)


@contextmanager
def graph_pass(when: GraphKind, change: Callable[[fx.Graph], None], *, sources: Sequence[str] = ()) -> Iterator[None]:
    """Apply ``change`` to graphs before inductor's own passes, and after an existing custom pass.

    Args:
        when: ``"joint"``: to joint graphs of forward and backward; ``"apart"``: to each of the two.
        change: Depends only on the code of its module: inductor's caches identify it by that.
        sources: Other files that it depends on.
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
                return None  # no caching, as without our pass
            return get_hash_for_files((source, *sources)), change.__name__, others

    with _set(name, Pass()):
        yield


def passes_in(setting: Any) -> list[Any]:
    """Return the passes in a setting of inductor: none, one or several."""
    return [] if setting is None else [*setting] if isinstance(setting, (list, tuple)) else [setting]


def known_by(passes: Iterable[Any]) -> tuple[Any, ...] | None:
    """Return the cache keys of ``passes``, or None if one of them has none."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    keys = tuple(each.uuid() if isinstance(each, CustomGraphPass) else None for each in passes)
    return None if None in keys else keys


def known_to_caches(*functions: Callable[..., Any], sources: Sequence[str]) -> AbstractContextManager[None]:
    """Let inductor cache graphs that call ``functions``, which `torch.compiler.allow_in_graph` does not trace.

    By default torch compiles such a graph again in each process, since it cannot know what the functions do.

    Args:
        functions: The functions.
        sources: Files with everything that they do: caches identify them by the content.
    """
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import get_hash_for_files

    name = "unsafe_marked_cacheable_functions"
    key = get_hash_for_files(tuple(sources)).hex()
    ours = {f"{function.__module__}.{function.__name__}": key for function in functions}
    return _set(name, {**getattr(config, name), **ours})


def tuned_blocks() -> AbstractContextManager[None]:
    """Let inductor try more block sizes for kernels, which takes minutes."""
    return _set("coordinate_descent_tuning")


def _set(name: str, value: Any = True) -> AbstractContextManager[None]:  # noqa: FBT002
    from torch._inductor import config  # slow to import

    return setting(config, name, value, everywhere=True)
