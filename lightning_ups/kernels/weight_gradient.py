"""The gradient of a weight as a float32 sum of products, in no more memory than the sum itself."""
# ruff: noqa: N803 (shape suffixes are capitals)

import torch
from torch import Tensor

from lightning_ups._compat.torch.tensors.tensors import add_product, product

_ALIGNED = 8  # elements of 2 bytes that a matrix product can read at once
_ROWS_AT_FIRST = 1024


class WeightGradient:
    """A sum over chunks of rows in ``precise``, returned in the weight's dtype.

    If the weight is in half precision and there are several chunks, the sum takes twice the result's memory, and both
    exist during the conversion. With ``lean`` they do not: the first half is summed in the result's own memory, and
    converted there.

    Args:
        weight: The weight.
        precise: The dtype of the sum.
        once: There is one chunk, so nothing is summed here.
        lean: Use no memory besides that of the sum. Each chunk then needs two products.
    """

    def __init__(self, weight: Tensor, precise: torch.dtype, *, once: bool = False, lean: bool = False) -> None:
        self._result: Tensor | None = None
        self._empty = True
        shape = vocab, dim = weight.shape
        if once or not lean or 2 * weight.dtype.itemsize != precise.itemsize:
            self._parts = [torch.empty(shape, dtype=weight.dtype if once else precise, device=weight.device)]
            self._dtype = weight.dtype
            return
        self._result = torch.empty(shape, dtype=weight.dtype, device=weight.device)
        split = vocab // 2 // _ALIGNED * _ALIGNED
        low = self._result.view(-1)[: 2 * split * dim].view(precise).view(split, dim)
        self._parts = [low, torch.empty((vocab - split, dim), dtype=precise, device=weight.device)]

    def add(self, grad_CV: Tensor, hidden_CD: Tensor) -> None:
        """Add ``grad_CV.t() @ hidden_CD``."""
        start = 0
        for part in self._parts:
            columns = grad_CV[:, start : start + len(part)].t()
            start += len(part)
            if self._empty:
                product(columns, hidden_CD, dtype=part.dtype, out=part)
            else:
                add_product(part, columns, hidden_CD)
        self._empty = False

    def take(self) -> Tensor:
        """Return the result; the sum is freed."""
        parts, self._parts = self._parts, []
        if self._empty:
            for part in parts:
                part.zero_()
        if self._result is None:
            return parts[0].to(self._dtype)
        _narrow(parts[0], self._result)
        self._result[len(parts[0]) :].copy_(parts[1])
        return self._result


def _narrow(wide: Tensor, result: Tensor) -> None:
    """Copy ``wide`` into the first rows of ``result``, in whose memory it is, at half the width.

    A row moves to the place of the row with half its index. So rows n to 2n move to where rows n/2 to n were, which
    have moved before: no copy reads what it or an earlier one has written, except the first, which uses a separate
    buffer.
    """
    done = min(len(wide), _ROWS_AT_FIRST)
    result[:done].copy_(wide[:done].to(result.dtype))
    while done < len(wide):
        rows = slice(done, min(2 * done, len(wide)))
        result[rows].copy_(wide[rows])
        done = rows.stop
