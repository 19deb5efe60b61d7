"""Products of halves, summed and returned in float32: what torch offers for it differs by version and device."""

from functools import cache

import torch
from torch import Tensor

__all__ = ["add_product", "product"]

_PIECES = 8


def product(a: Tensor, b: Tensor, *, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Return ``a @ b`` in ``dtype``, which is theirs or float32; summed in float32 at least."""
    if a.dtype == dtype:
        return torch.mm(a, b, out=out)
    if a.is_cuda and dtype == torch.float32:
        return torch.mm(a, b, out_dtype=dtype, out=out)
    wide = torch.promote_types(a.dtype, torch.float32)
    result = torch.mm(a.to(wide), b.to(wide)).to(dtype)
    return result if out is None else out.copy_(result)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add ``a @ b`` to ``total``, which is of their type or float32."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda and _adds_into_float32(a.dtype):
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        rows = -(-len(total) // _PIECES) or 1
        for start in range(0, len(total), rows):  # so that the product takes little beside what it is added to
            piece = slice(start, start + rows)
            total[piece].add_(product(a[piece], b, dtype=total.dtype))


@cache
def _adds_into_float32(dtype: torch.dtype) -> bool:
    # 2.9 has the argument and refuses a float32 summand, 2.11 takes one; asking a small product is the way to know.
    total = torch.zeros(16, 16, device="cuda")
    a = torch.ones(16, 16, device="cuda", dtype=dtype)
    try:
        torch.addmm(total, a, a, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return bool((total == 16).all())
