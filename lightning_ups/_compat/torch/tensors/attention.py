"""Internals of torch's `scaled_dot_product_attention`, and packages with more attention kernels."""
# ruff: noqa: N803 (shape suffixes are capitals)

import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Literal

import torch
from lightning_utilities.core.imports import RequirementCache
from torch import Tensor
from torch.backends import cuda
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention as scaled_dot_product_attention

from lightning_ups._compat.optional.packages import require

_FA4 = "flash-attn-4>=4.0.0b1"
_COMPILING = r"Argument aux_data \(position \d+\) cannot be converted to a JitArgument"


def holders(function: Callable[..., Any]) -> list[tuple[ModuleType, str]]:
    """Return the imported modules that hold ``function``, each with the name that it has there."""
    modules = {id(module): module for module in sys.modules.values() if isinstance(module, ModuleType)}
    return [
        (module, name) for module in modules.values() for name, value in list(vars(module).items()) if value is function
    ]


def torch_choice(
    q: Tensor, k: Tensor, v: Tensor, *, dropout: float, is_causal: bool, scale: float | None, grouped: bool
) -> SDPBackend:
    """Return the kernel that torch would choose for a call without a mask."""
    return SDPBackend(torch._fused_sdp_choice(q, k, v, None, dropout, is_causal, scale=scale, enable_gqa=grouped))


@cache  # kernels ask at each call; looking up what is installed takes about half a millisecond
def load_fa4(*, feature: str) -> ModuleType:
    """Return ``flash_attn.cute.interface``; importing it takes seconds.

    While it compiles a kernel, it warns about an argument that it passes itself; the warning is hidden.
    """
    interface = require("flash_attn.cute.interface", requirement=_FA4, extra="flash", feature=feature)
    warnings.filterwarnings("ignore", message=_COMPILING, category=UserWarning)
    return interface


@cache
def load_fa3(*, feature: str) -> Any:
    """Return the namespace of operators, ``fwd`` and ``bwd``, that FlashAttention-3 registers.

    Raises:
        ModuleNotFoundError: If it is not installed.
        ImportError: If its version differs from the one that torch's own interface supports.
    """
    if find_spec("flash_attn_interface") is None:
        raise ModuleNotFoundError(
            f"{feature} needs FlashAttention-3 (flash_attn_interface), which no package index has. Build it by `python"
            " setup.py install` in the folder 'hopper' of flash-attention, or use backend 'fa4' (pip install"
            " 'flash-attn-4>=4.0.0b1')."
        )
    __import__("flash_attn_interface")
    operators = torch.ops.flash_attn_3
    if not (hasattr(operators, "fwd") and hasattr(operators, "bwd")):
        raise ImportError(
            f"{feature} found a flash_attn_interface without the operators flash_attn_3::fwd and ::bwd. Rebuild it from"
            " the current flash-attention repository, with the backward pass, or use backend 'fa4'."
        )
    return operators


def missing_package(backend: str) -> str | None:
    """Return why the package of ``backend`` is not available, or None; an installed one is loaded to find out."""
    if backend == "fa4":
        return _broken_fa4() if RequirementCache(_FA4) else f"{_FA4} is not installed"
    if backend == "fa3":
        return None if find_spec("flash_attn_interface") else "flash_attn_interface is not installed"
    return None


@cache
def _broken_fa4() -> str | None:
    try:
        load_fa4(feature="Attention by backend 'fa4'")
    except ImportError as error:
        reason = str(error.__cause__ or error).strip().rstrip(".")
        broken = f"{_FA4} is installed and cannot be loaded: {reason}"
        warnings.warn(
            f"{broken}. Attention that is chosen by 'auto' goes without it. Reinstall it for this torch and CUDA: pip"
            f" install --force-reinstall '{_FA4}'; or uninstall it.",
            stacklevel=2,
        )
        return broken
    return None


def torch_refuses(
    backend: Literal["cudnn", "flash", "efficient"],
    *,
    dtype: torch.dtype,
    heads: tuple[int, int],
    head_dims: tuple[int, int],
    causal: bool,
    trains: bool,
) -> str | None:
    """Return torch's reasons why its CUDA kernel does not support such tensors, or None if it does.

    Torch's limits (above all of the head dimension) depend on its version, cuDNN's and the device.
    """

    def sample(num_heads: int, dim: int) -> Tensor:
        return torch.empty(1, 128, num_heads, dim, dtype=dtype, device="cuda", requires_grad=trains).transpose(1, 2)

    q, k, v = sample(heads[0], head_dims[0]), sample(heads[1], head_dims[0]), sample(heads[1], head_dims[1])
    params = cuda.SDPAParams(q, k, v, None, 0.0, causal, heads[0] != heads[1])
    ask = {
        "cudnn": cuda.can_use_cudnn_attention,
        "flash": cuda.can_use_flash_attention,
        "efficient": cuda.can_use_efficient_attention,
    }[backend]
    if ask(params):
        return None
    with warnings.catch_warnings(record=True) as said, _written_to_stderr() as written:
        warnings.simplefilter("always")
        ask(params, debug=True)
    reasons = [str(warning.message).split(" (Triggered")[0] for warning in said]
    reasons += [match["text"] for match in _LOGGED.finditer(written[0])]
    return "; ".join(reasons) or "torch gives no reason"


# Outside of operators, torch logs its warnings instead of using Python's.
_LOGGED = re.compile(r"Warning: (?P<text>.+?)(?: \(function \w+\))?$", re.MULTILINE)


@contextmanager
def _written_to_stderr() -> Iterator[list[str]]:
    """Capture what is written to the process's standard error; the list has it afterwards."""
    found = [""]
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield found
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
        file.seek(0)
        found[0] = file.read().decode(errors="replace")


def flash2_packed(
    q_BSHD: Tensor,
    k_BSKD: Tensor,
    v_BSKD: Tensor,
    *,
    cu_seqlens: Tensor | None,
    max_seqlen: int,
    causal: bool,
    window: int | None,
    scale: float,
) -> Tensor:
    """Run torch's FlashAttention-2 with a window or documents, which its public function does not support."""
    left = -1 if window is None else window - 1
    right = 0 if causal else left
    tensors = (q_BSHD, k_BSKD, v_BSKD)
    if cu_seqlens is not None:
        tensors = tuple(tensor.flatten(0, 1) for tensor in tensors)
    out = torch.ops.aten._flash_attention_forward(
        *tensors,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        0.0,
        causal,
        False,  # noqa: FBT003
        scale=scale,
        window_size_left=left,
        window_size_right=right,
    )[0]
    return out.view(q_BSHD.shape)


_FORWARD = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)


def attention_operators(part: Literal["forward", "backward"]) -> list[Any]:
    """Return the operators that `scaled_dot_product_attention` dispatches to, for [batch, heads, seq, dim]."""
    names = _FORWARD if part == "forward" else tuple(f"{name}_backward" for name in _FORWARD)
    packets = (getattr(torch.ops.aten, name, None) for name in names)
    return [packet for packet in packets if packet is not None]


@contextmanager
def unfused_flex_allowed() -> Iterator[None]:
    """Silence the warning that FlexAttention is slow outside a compiled function."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*flex_attention called without torch.compile.*")
        yield
