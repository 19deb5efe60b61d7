"""torch's process-wide switches with private names, read and written exactly.

TF32 has two interfaces to one state. The legacy one (``allow_tf32``, ``set_float32_matmul_precision``) works for all
readers; after using only the newer ``fp32_precision``, the legacy getters, which Inductor's autotuning and Lightning
call, raise "mix of the legacy and new APIs". Therefore the legacy setters are used unless the state is already mixed,
the newer ones if it is, and states that the legacy ones cannot express are restored setting by setting.
"""

import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend

_Cell = tuple[str, str]
_PARENTS: tuple[_Cell, ...] = (("generic", "all"), ("cuda", "all"), ("mkldnn", "all"))
_MATMUL: tuple[_Cell, ...] = (("cuda", "matmul"),)
_CUDNN: tuple[_Cell, ...] = (("cuda", "conv"), ("cuda", "rnn"))
_ONEDNN: _Cell = ("mkldnn", "matmul")  # torch.set_float32_matmul_precision sets it, too


class Tf32(NamedTuple):
    """Whether float32 work on a GPU may use TF32."""

    matmul: bool
    cudnn: bool


def read_tf32() -> Tf32:
    """Return the current state, whichever interface set it."""
    return Tf32(_all_are(_MATMUL, enabled=True), _all_are(_CUDNN, enabled=True))


def write_tf32(*, enabled: bool) -> None:
    """Set TF32 for matrix products and cuDNN, unless they already have that value."""
    if not enabled and _matmul_precision() in ("high", "medium"):
        with _quiet():  # `allow_tf32 = False` would not change oneDNN's setting, and the state would be mixed
            torch.set_float32_matmul_precision("highest")
    for cells, legacy in ((_MATMUL, "cublas"), (_CUDNN, "cudnn")):
        if _all_are(cells, enabled=enabled):
            continue
        if _legacy(legacy) is not None:
            with _quiet():
                getattr(torch._C, f"_set_{legacy}_allow_tf32")(enabled)
        if not _all_are(cells, enabled=enabled):  # already mixed, or inherited from torch.backends.fp32_precision
            for cell in cells:
                _set(cell, "tf32" if enabled else "ieee")


def save_tf32() -> Callable[[], None]:
    """Return a function that restores TF32 to its current state, for every interface."""
    saved = _state()

    def restore() -> None:
        now = _state()
        with _quiet():
            if now.precision != saved.precision:
                torch.set_float32_matmul_precision(saved.precision)
            if now.cudnn != saved.cudnn:
                torch.backends.cudnn.allow_tf32 = saved.cudnn
        # Unset convolutions are in a state that no setter can restore: write only what differs.
        for cell, value in _state().cells.items():
            if value != saved.cells[cell]:
                _set(cell, saved.cells[cell])

    return restore


class _State(NamedTuple):
    cells: dict[_Cell, str]
    precision: str
    cudnn: bool


def _state() -> _State:
    # A getter resolves inherited values; setting the result would end the inheritance.
    cells: dict[_Cell, str] = {}
    for parent in _PARENTS:
        cells[parent] = _get(parent)
        _set(parent, "none")
    cells |= {cell: _get(cell) for cell in (*_MATMUL, *_CUDNN, _ONEDNN)}
    # The legacy getters raise if their own value and the settings disagree: make them agree first.
    precision = _matmul_precision()
    if precision is None:
        with _holding("ieee", *_MATMUL, _ONEDNN):
            precision = _matmul_precision()
    cudnn = _legacy("cudnn")
    if cudnn is None:
        with _holding("tf32", *_CUDNN):
            cudnn = _legacy("cudnn") is True
    for parent in _PARENTS:
        _set(parent, cells[parent])
    return _State(cells, precision or "highest", cudnn)


@contextmanager
def _holding(value: str, *cells: _Cell) -> Iterator[None]:
    before = [_get(cell) for cell in cells]
    for cell in cells:
        _set(cell, value)
    yield
    for cell, was in zip(cells, before, strict=True):
        _set(cell, was)


def _all_are(cells: tuple[_Cell, ...], *, enabled: bool) -> bool:
    return all((_get(cell) == "tf32") == enabled for cell in cells)


def _get(cell: _Cell) -> str:
    return torch._C._get_fp32_precision_getter(*cell)


def _set(cell: _Cell, value: str) -> None:
    torch._C._set_fp32_precision_setter(*cell, value)


def _legacy(name: str) -> bool | None:
    try:
        with _quiet():
            return getattr(torch._C, f"_get_{name}_allow_tf32")()
    except RuntimeError:  # the user mixed both interfaces
        return None


def _matmul_precision() -> str | None:
    try:
        with _quiet():
            return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*TF32.*")  # once per process, in some versions
        yield


class AttentionState(NamedTuple):
    """The kernels that ``scaled_dot_product_attention`` may choose, and their order."""

    enabled: frozenset[SDPBackend]
    order: tuple[SDPBackend, ...]


_SWITCHES = {
    SDPBackend.CUDNN_ATTENTION: (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
    SDPBackend.FLASH_ATTENTION: (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    SDPBackend.EFFICIENT_ATTENTION: (
        torch.backends.cuda.mem_efficient_sdp_enabled,
        torch.backends.cuda.enable_mem_efficient_sdp,
    ),
    SDPBackend.MATH: (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
}


def settle_attention(device: torch.device) -> None:
    """Let torch set its own kernel order for a GPU, as it would in the first attention call, replacing any other."""
    if device.type == "cuda":
        x = torch.empty(1, 1, 8, 8, dtype=torch.bfloat16, device=device)
        torch._fused_sdp_choice(x, x, x)


def read_attention() -> AttentionState:
    """Return the current state."""
    order = tuple(SDPBackend(number) for number in torch._C._get_sdp_priority_order())
    return AttentionState(allowed_attention(), order)


def allowed_attention() -> frozenset[SDPBackend]:
    """Return the kernels that may currently be chosen."""
    return frozenset(backend for backend, (enabled, _) in _SWITCHES.items() if enabled())


def write_attention(state: AttentionState) -> None:
    """Set ``state``; kernels that its order does not name follow in their current order.

    Not ``sdpa_kernel``, which on exit loses the position of kernels that were disabled before.
    """
    for backend, (_, enable) in _SWITCHES.items():
        enable(backend in state.enabled)
    rest = [b for b in read_attention().order if b not in state.order]
    torch._C._set_sdp_priority_order([int(backend.value) for backend in (*state.order, *rest)])


def forget_graphs() -> None:
    """Drop compiled graphs, which depend on the earlier state without a guard."""
    if "torch._dynamo" not in sys.modules or not torch._dynamo.utils.counters["stats"]["unique_graphs"]:
        return  # nothing was compiled
    if "torch._inductor.cudagraph_trees" in sys.modules:
        torch.compiler.reset()
    else:  # `reset` would import all of Inductor because of CUDA graphs, which cannot exist
        torch._dynamo.reset_code_caches()


@contextmanager
def cache_key_tag(tag: str) -> Iterator[None]:
    """Separate compiled code on disk by ``tag``, for state that torch's keys leave out (such as attention)."""
    import torch.compiler.config as config

    before = config.cache_key_tag
    config.cache_key_tag = f"{before}+{tag}" if before else tag
    try:
        yield
    finally:
        config.cache_key_tag = before


def allocator_settings() -> dict[str, Any] | None:
    """Return the CUDA allocator's current settings; None before CUDA is initialized."""
    if not torch.cuda.is_initialized():
        return None
    snapshot: dict[str, Any] = dict(torch.cuda.memory._snapshot())
    return dict(snapshot["allocator_settings"])


def set_allocator_settings(text: str, /) -> None:
    """Configure the allocator as the environment variable would, in a running process.

    Raises:
        RuntimeError: If torch refuses ``text``.
    """
    torch._C._accelerator_setAllocatorSettings(text)


def merge_settings(text: str, changes: Mapping[str, Any], /) -> str:
    """Return allocator settings ``text`` with ``changes`` applied."""
    for key in changes:
        text = re.sub(rf"(^|,)\s*{key}\s*:[^,\[\]]*", "", text)
    return ",".join([*filter(None, [text.strip(", ")]), *(f"{key}:{value}" for key, value in changes.items())])
