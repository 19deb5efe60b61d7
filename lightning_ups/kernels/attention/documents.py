"""Document boundaries of a packed batch, in the two forms that kernels need."""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Documents"]


@dataclass(eq=False)  # not frozen: Lightning's precisions, which convert batches, could not modify it
class Documents:
    """The documents of a packed batch: a token sees only tokens of its own document.

    Create it with the batch, on the CPU (`from_ids`, `from_cu_seqlens`): finding the boundaries on a GPU synchronizes.
    Data loaders pin it and Lightning moves it like a tensor, and all layers share it.

    Args:
        ids: [batch, seq] int32, the index of each token's document, increasing by one from document to document.
        cu_seqlens: [documents + 1] int32, the start of each document in the concatenated rows of the batch, and the end
            of the last.
        max_seqlen: An upper bound of the documents' lengths, rounded up to a power of two, so that a compiled function
            sees few different values.
    """

    ids: Tensor
    cu_seqlens: Tensor
    max_seqlen: int

    @classmethod
    def from_ids(cls, ids: Tensor) -> "Documents":
        """Create it from ``ids`` [batch, seq]: a document is a run of equal numbers in one row.

        Raises:
            TypeError: If ``ids`` is not a tensor.
            ValueError: If ``ids`` is not [batch, seq].
        """
        _check_tensor("ids", ids, floats=True)
        if ids.dim() != 2:
            raise ValueError(
                f"Document ids of shape {tuple(ids.shape)} were given."
                " They are [batch, seq], one for each token, so that rows can be distinguished."
                " Use ids.unsqueeze(0) for a single sequence."
            )
        starts = torch.ones_like(ids, dtype=torch.bool)
        starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
        ends = torch.tensor([ids.numel()], device=ids.device)
        return cls._from(starts, torch.cat((starts.flatten().nonzero().flatten(), ends)))

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor, *, batch: int, seq: int) -> "Documents":
        """Create it from ``cu_seqlens`` [documents + 1], boundaries in the concatenated rows of ``batch * seq`` tokens.

        Raises:
            TypeError: If ``cu_seqlens`` is not an integer tensor.
            ValueError: If the boundaries do not increase from 0 to ``batch * seq``, or a document crosses the end of a
                row.
        """
        _check_tensor("cu_seqlens", cu_seqlens)
        if cu_seqlens.dim() != 1 or not len(cu_seqlens):
            raise ValueError(
                f"cu_seqlens of shape {tuple(cu_seqlens.shape)} were given."
                " They are one row of boundaries, [documents + 1], in the rows of the batch laid end to end."
                " Lay those of single rows end to end: add to each what lies before its row."
            )
        cu_seqlens = cu_seqlens.long()  # an index; uint8 would be a mask
        starts = torch.zeros(batch * seq + 1, dtype=torch.bool, device=cu_seqlens.device)
        starts[cu_seqlens.clamp(0, batch * seq)] = True
        rows = torch.arange(batch + 1, device=cu_seqlens.device) * seq
        ends = int(cu_seqlens[0]) == 0 and int(cu_seqlens[-1]) == batch * seq
        if not (ends and bool(starts[rows].all()) and bool((cu_seqlens.diff() >= 0).all())):
            raise ValueError(
                f"cu_seqlens from {int(cu_seqlens[0])} to {int(cu_seqlens[-1])} do not cut {batch} rows of {seq} tokens"
                " into documents."
                " They are boundaries in the rows laid end to end, in order, and every row's end is one of them."
                f" Let them rise from 0 to {batch * seq}, and cut documents at the end of a row."
            )
        return cls._from(starts[:-1].unflatten(0, (batch, seq)), cu_seqlens)

    @classmethod
    def _from(cls, starts: Tensor, cu_seqlens: Tensor) -> "Documents":
        longest = int(cu_seqlens.diff().max()) if starts.numel() else 1
        ids = starts.flatten().cumsum(0).view_as(starts) - 1
        bound = min(1 << (longest - 1).bit_length(), starts.shape[1])
        return cls(ids.to(torch.int32), cu_seqlens.to(torch.int32), bound)

    def to(self, *args: object, **kwargs: object) -> "Documents":
        """Return a copy on another device; accepts the arguments of ``Tensor.to``."""
        move = torch.Tensor.to
        return Documents(move(self.ids, *args, **kwargs), move(self.cu_seqlens, *args, **kwargs), self.max_seqlen)  # type: ignore[arg-type]

    def pin_memory(self) -> "Documents":
        """Return a copy in pinned memory, from which it moves to a GPU without synchronizing."""
        return Documents(self.ids.pin_memory(), self.cu_seqlens.pin_memory(), self.max_seqlen)


def _check_tensor(name: str, given: object, *, floats: bool = False) -> None:
    if isinstance(given, Tensor) and (floats or not given.is_floating_point()):
        return
    kind = f"tensor of {str(given.dtype).removeprefix('torch.')}" if isinstance(given, Tensor) else type(given).__name__
    raise TypeError(
        f"Documents were asked for with {name} that are a {kind}."
        " They are whole numbers in a tensor, on the device of the tokens."
        f" Use torch.tensor({name}) of a list, or {name}.long()."
    )
