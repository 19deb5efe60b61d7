"""The dtypes of a run, as data that strategies and refusals can read."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lightning_ups.transforms.blocks import as_patterns

__all__ = ["STOCK_POLICIES", "DtypePolicy"]


@dataclass(frozen=True, kw_only=True)
class DtypePolicy:
    """The dtypes of computation. Parameters and optimizer state keep their dtypes. None: unchanged.

    Args:
        param: The dtype in which modules compute.
        reduce: The dtype in which gradients are reduced over devices.
        output: The dtype of a root's outputs, and therefore of a loss that is computed outside of it.
        in_float32: Patterns of submodules that compute in float32 anyway.
        autocast: Each operator chooses its dtype, as under ``torch.autocast``: matrix products and convolutions use
            ``param``, everything else keeps the dtype of its inputs. If False, whole modules compute in ``param``.
    """

    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    output: torch.dtype | None = None
    in_float32: tuple[str, ...] = ()
    autocast: bool = False

    @classmethod
    def bf16_mixed(cls, *, in_float32: Sequence[str] = (), autocast: bool = False) -> "DtypePolicy":
        """Return the policy of Lightning's ``"bf16-mixed"``, except for submodules that compute ``in_float32``."""
        return cls(
            param=torch.bfloat16,
            reduce=torch.float32,
            output=torch.float32,  # autocast runs losses in float32, whatever their inputs
            in_float32=as_patterns(in_float32),
            autocast=autocast,
        )


STOCK_POLICIES: dict[str, DtypePolicy] = {
    "32-true": DtypePolicy(),
    "bf16-mixed": DtypePolicy.bf16_mixed(autocast=True),
}
