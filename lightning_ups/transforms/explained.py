"""Errors within a step of a sharded model, whose own words do not say what to do."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["explaining_reads"]

_OF_TWO_TYPES = ("same dtype", "expected scalar type")  # what torch says of a product of two types


@contextmanager
def explaining_reads(step: str, *, param_dtype: torch.dtype | None) -> Iterator[None]:
    """Say why ``step`` fails, in this context, if it is since weights are shards, or of another type than in memory.

    Args:
        step: Its name.
        param_dtype: The type in which modules compute; None: that of the parameters.

    Raises:
        RuntimeError: If it fails so.
    """
    try:
        yield
    except RuntimeError as error:
        said = str(error).splitlines()[0].rstrip(".") if str(error) else ""
        if "mixed torch.Tensor and DTensor" in said:
            raise RuntimeError(
                f"{step} reads a parameter outside the forward of its module, which it did not do the first time:"
                f" {said}."
                " What the first step reads so is found, and gathered for every step; this one was not."
                " Call the module and not a method of it, or name the parameters:"
                " FSDP2Strategy(outside=['encoder.*.weight'])."
            ) from error
        if param_dtype is not None and any(words in said for words in _OF_TWO_TYPES) and "is read outside" not in said:
            raise RuntimeError(
                f"{step} computes with tensors of two types: {said}."
                f" Under this precision weights are gathered as {param_dtype}, and what is given to blocks and roots is"
                " cast to it; a tensor that a forward makes in another type is not, as autocast would."
                " Cast it there, as in x.to(self.weight.dtype), name the module that it is given to in blocks=[...], or"
                " train with precision='32-true'."
            ) from error
        raise
