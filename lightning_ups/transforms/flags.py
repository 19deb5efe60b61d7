"""Process-wide switches that affect speed, set for a while and restored.

A switch that is None is not changed. Contexts nest: each restores the value that it found, not a default.
"""

import gc
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention

from lightning_ups._compat.torch.flags import (
    AttentionState,
    allocator_settings,
    cache_key_tag,
    forget_graphs,
    merge_settings,
    read_attention,
    read_tf32,
    save_tf32,
    set_allocator_settings,
    settle_attention,
    write_attention,
    write_tf32,
)
from lightning_ups.kernels.attention import routed_attention
from lightning_ups.kernels.attention.routing import has_routed
from lightning_ups.kernels.attention.support import Kind, refusal

AttentionBackend = Literal["cudnn", "flash", "efficient", "math", "fa4", "fa3", "flex", "auto"]

# The kernels that torch's own function chooses among; `routed_attention` handles the others.
_BACKENDS: dict[AttentionBackend, SDPBackend] = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
_NAMES = {backend: name for name, backend in _BACKENDS.items()}
_GPU_ONLY = frozenset({"cudnn", "efficient", "fa4", "fa3", "flex", "auto"})
_TF32_CAPABILITY = (8, 0)
_FROZEN_BY_PYTHON = 5_000  # since 3.12 the interpreter freezes some hundreds of its own objects at start
_MB = 1 << 20
_MAX_MB = 1 << 44  # the allocator counts bytes in 64 bits


@dataclass(frozen=True, kw_only=True, slots=True)
class Flags:
    """Values to set; None does not change a switch. ``AccelerationFlags`` documents each."""

    tf32: bool | None = None
    cudnn_benchmark: bool | None = None
    attention: Sequence[AttentionBackend] | None = None
    expandable_segments: bool | None = None
    max_split_size_mb: int | None = None
    garbage_collection_threshold: float | None = None
    gc_interval: int | None = None

    def __post_init__(self) -> None:
        _check_attention(self.attention)
        _check_range("max_split_size_mb", self.max_split_size_mb, above=20, below=_MAX_MB)
        _check_range("garbage_collection_threshold", self.garbage_collection_threshold, above=0, below=1)
        _check_range("gc_interval", self.gc_interval, above=0)

    @property
    def asked(self) -> dict[str, Any]:
        """Return the switches that are not None."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def of_allocator(self) -> dict[str, Any]:
        """Return the settings for the CUDA allocator, with the allocator's own names."""
        return {name: value for name, value in self.asked.items() if name in _ALLOCATOR}


_ALLOCATOR = ("expandable_segments", "max_split_size_mb", "garbage_collection_threshold")


@contextmanager
def accelerated(flags: Flags, *, device: torch.device | str) -> Iterator["PacedCollection | None"]:
    """Set the ``flags`` that have an effect on ``device``; yield the garbage collector, if it is paced.

    Raises:
        RuntimeError: If an attention kernel or an allocator setting is not available.
    """
    device = torch.device(device)
    idle = without_effect(flags, device=device)
    with ExitStack() as stack:
        if changes := {name: value for name, value in flags.of_allocator.items() if name not in idle}:
            stack.enter_context(allocator(**changes))
        if flags.tf32 is not None and "tf32" not in idle:
            stack.enter_context(tf32(enabled=flags.tf32))
        if flags.cudnn_benchmark is not None and "cudnn_benchmark" not in idle:
            stack.enter_context(cudnn_benchmark(enabled=flags.cudnn_benchmark))
        if flags.attention is not None:
            stack.enter_context(attention_backends(flags.attention, device=device))
        yield stack.enter_context(PacedCollection(flags.gc_interval)) if flags.gc_interval else None


def without_effect(flags: Flags, *, device: torch.device) -> dict[str, str]:
    """Return the ``flags`` that have no effect on ``device``, with the reasons."""
    asked = flags.asked
    if device.type != "cuda":
        why = f"no effect on {device.type}"
        idle = {name: why for name in ("tf32", "cudnn_benchmark", *_ALLOCATOR) if name in asked}
        if said := _attention_without_effect(flags.attention or (), why=why):
            idle["attention"] = said
        return idle
    capability = torch.cuda.get_device_capability(device)
    if flags.tf32 and capability < _TF32_CAPABILITY:
        return {"tf32": f"no effect on a GPU of compute capability {capability[0]}.{capability[1]}, which has no TF32"}
    return {}


def _attention_without_effect(names: Sequence[AttentionBackend], *, why: str) -> str:
    missing, here = [n for n in names if n in _GPU_ONLY], [n for n in names if n not in _GPU_ONLY]
    if _auto_is_math(names, here):
        missing.remove("auto")
    said = [f"{', '.join(missing)}: {why}"] if missing else []
    if here == ["math", "flash"]:
        said.append("torch takes flash before math on a CPU, whatever the order")
    return "; ".join(said)


@contextmanager
def tf32(*, enabled: bool) -> Iterator[None]:
    """Allow TF32 in float32 matrix products and cuDNN, or forbid it, while the context is open."""
    restore, before = save_tf32(), read_tf32()
    with ExitStack() as stack:
        stack.callback(restore)
        write_tf32(enabled=enabled)
        if read_tf32().cudnn != before.cudnn:  # torch's guards and cache keys only include the flag of matrix products
            stack.enter_context(_own_graphs(f"cudnn_tf32={enabled}"))
        yield


@contextmanager
def cudnn_benchmark(*, enabled: bool) -> Iterator[None]:
    """Turn cuDNN's benchmark mode on or off while the context is open."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = enabled
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


@contextmanager
def attention_backends(names: Sequence[AttentionBackend], *, device: torch.device) -> Iterator[None]:
    """Let ``scaled_dot_product_attention`` use only the kernels ``names``, in this order.

    For kernels that torch's own function does not have, or ``"auto"``, the function is replaced.

    The attention kernel is fixed in a graph, and neither a guard nor the key of torch's cache on disk depends on it.
    Graphs made under another choice are therefore dropped at both ends, and graphs made here get their own keys.

    Raises:
        RuntimeError: If a kernel is not available on ``device``.
    """
    _check_attention(names)
    wanted = _had_on(device, names)
    if not wanted and "auto" in names:  # torch's behavior there
        yield
        return
    errors = {name: attention_kernel_error(name, device=device) for name in wanted or names}
    if failed := [name for name in errors if errors[name]]:
        raise RuntimeError(
            f"The attention kernel {failed[0]!r} cannot run on {device.type}: {errors[failed[0]]}"
            " Every attention call of the model would fail, or silently use another kernel."
            f" Leave it out: attention={[name for name in errors if name not in failed] or None}."
        )
    if _beyond_torchs(wanted):
        with routed_attention(wanted):
            yield
        return
    settle_attention(device)
    before = read_attention()
    backends = tuple(_BACKENDS[name] for name in wanted)
    state = AttentionState(frozenset(backends), backends)
    with ExitStack() as stack:
        stack.callback(write_attention, before)
        write_attention(state)
        if read_attention() != before:
            stack.enter_context(_own_graphs(f"attention={'>'.join(wanted)}"))
        yield


def attention_is_unused(names: Sequence[AttentionBackend], *, device: torch.device) -> bool:
    """Return whether no attention call reached the replacement made by `attention_backends`."""
    wanted = _had_on(device, names)
    return _beyond_torchs(wanted) and not has_routed(wanted)


def _had_on(device: torch.device, names: Sequence[AttentionBackend]) -> list[AttentionBackend]:
    had: list[AttentionBackend] = [name for name in names if device.type == "cuda" or name not in _GPU_ONLY]
    if _auto_is_math(names, had):
        had.append("math")
    return had


def _auto_is_math(names: Sequence[str], had: Sequence[str]) -> bool:
    # It supports every call, also those that the kernels before it do not.
    return bool(had) and "auto" in names and not {"auto", "math"} & {*had}


def _beyond_torchs(names: Sequence[AttentionBackend]) -> bool:
    return not {*names} <= {*_BACKENDS}


def attention_kernel_error(name: AttentionBackend, *, device: torch.device) -> str | None:
    """Run the attention kernel ``name`` once on ``device``, and return why it fails, or None."""
    dtype = torch.float32
    if device.type == "cuda":
        dtype = torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    if name == "auto":
        return None
    if name not in _BACKENDS:
        found = refusal(name, Kind(device.type, dtype, 1, 1, 64, 64, causal=True))
        return None if found is None else ". ".join(found) + "."
    backend, before = _BACKENDS[name], read_attention()
    tokens = torch.zeros(1, 1, 64, 64, device=device, dtype=dtype, requires_grad=True)  # draws no random number
    with warnings.catch_warnings(record=True) as reasons, torch.enable_grad():
        warnings.simplefilter("always")
        try:
            write_attention(AttentionState(frozenset({backend}), (backend,)))
            scaled_dot_product_attention(tokens, tokens, tokens, is_causal=True)
        except RuntimeError as error:
            said = [str(reason.message).partition(" (Triggered")[0] for reason in reasons]
            return " ".join(said) or str(error).partition("\n")[0]
        finally:
            write_attention(before)
    return None


@contextmanager
def allocator(**changes: Any) -> Iterator[None]:
    """Change settings of the CUDA allocator for new allocations, while the context is open.

    Other settings from the environment stay. Memory that is already reserved is not affected.

    Raises:
        RuntimeError: If the allocator does not accept a setting.
    """
    if (backend := torch.cuda.get_allocator_backend()) != "native":
        raise RuntimeError(
            f"{_listed(changes)} was asked of the CUDA allocator {backend!r}."
            " Only torch's own allocator has these settings, and a running process cannot change its allocator."
            f" Take 'backend' out of PYTORCH_ALLOC_CONF, or leave these settings out."
        )
    torch.cuda.init()
    before = allocator_settings() or {}
    text = next((before[name] for name in before if name.endswith("ALLOC_CONF")), "")
    with ExitStack() as stack:
        # Two strings: the first resets what the second, torch's own, would not change.
        stack.callback(set_allocator_settings, text)
        stack.callback(
            set_allocator_settings,
            merge_settings(text, {"expandable_segments": before.get("expandable_segments", False)}),
        )
        set_allocator_settings(merge_settings(text, changes))
        _check_followed(changes)
        yield


def _check_followed(changes: dict[str, Any]) -> None:
    now = allocator_settings() or {}
    now["max_split_size_mb"] = now.get("max_split_size", 0) // _MB
    if ignored := {name: value for name, value in changes.items() if now.get(name) != value}:
        raise RuntimeError(
            f"The CUDA allocator did not take {_listed(ignored)}."
            " This platform does not support it, or CUDA was initialised too early for it."
            f" Set PYTORCH_ALLOC_CONF={merge_settings('', ignored)} in the environment before Python starts."
        )


class PacedCollection(AbstractContextManager["PacedCollection"]):
    """Run Python's garbage collector every ``interval`` batches, instead of automatically.

    Automatic collections stop the ranks at different times, and all wait for the slowest. After the first batch, all
    existing objects (the model, compiled code, modules) are frozen: later collections skip them.
    """

    def __init__(self, interval: int) -> None:
        self._interval, self._batches = interval, 0
        self._was_enabled, self._froze = True, False

    def __enter__(self) -> "PacedCollection":
        self._batches, self._froze, self._was_enabled = 0, False, gc.isenabled()
        gc.collect()
        gc.disable()
        return self

    def after_batch(self) -> None:
        """Count a batch, and collect if it is time."""
        self._batches += 1
        if self._batches == 1:
            gc.collect()
            # The process has one frozen pool: unfreezing ours would unfreeze objects that a caller froze.
            if not _is_frozen():
                gc.freeze()
                self._froze = True
        elif self._batches % self._interval == 0:
            gc.collect()

    def __exit__(self, *_: object) -> None:
        if self._froze:
            gc.unfreeze()
        if self._was_enabled:
            gc.enable()


def current_flags() -> dict[str, Any]:
    """Return the current values of all switches, read from torch and Python."""
    now, attention = read_tf32(), read_attention()
    return {
        "tf32_matmul": now.matmul,
        "tf32_cudnn": now.cudnn,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "attention": [_NAMES[b] for b in attention.order if b in attention.enabled],
        "allocator": allocator_settings(),
        "gc_enabled": gc.isenabled(),
        "gc_frozen": _is_frozen(),
        "num_threads": torch.get_num_threads(),
    }


def _is_frozen() -> bool:
    return gc.get_freeze_count() >= _FROZEN_BY_PYTHON


@contextmanager
def _own_graphs(tag: str) -> Iterator[None]:
    forget_graphs()
    try:
        with cache_key_tag(tag):
            yield
    finally:
        forget_graphs()


def _check_attention(names: Sequence[str] | None) -> None:
    if names is None:
        return
    known = get_args(AttentionBackend)
    if (
        not isinstance(names, Sequence)
        or isinstance(names, str)
        or not names
        or len({*names}) < len(names)
        or not {*names} <= {*known}
    ):
        raise ValueError(
            f"attention={names!r} is not an order of attention kernels."
            " It lists the allowed kernels in order of preference, without duplicates."
            f" Choose among {[*known]}, or None to leave torch's choice."
        )
    if "auto" in names[:-1]:
        raise ValueError(
            f"attention={names!r} has 'auto' before others."
            " It supports every call, so backends after it would never be used."
            " Put 'auto' at the end, or leave it out."
        )


def _check_range(name: str, value: float | None, *, above: float, below: float | None = None) -> None:
    if value is not None and not (value > above and (below is None or value < below)):
        limits = f"greater than {above}" + ("" if below is None else f" and less than {below}")
        raise ValueError(
            f"{name}={value} is out of range. It must be {limits}. Choose such a value, or None to leave it unchanged."
        )


def _listed(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())
