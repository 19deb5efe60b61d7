"""In which types a run computes, as data that strategies and refusals can read."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lightning_ups.transforms.blocks import as_patterns

__all__ = ["STOCK_POLICIES", "DtypePolicy"]


@dataclass(frozen=True, kw_only=True)
class DtypePolicy:
    """Types of computation; parameters and optimizer state stay as the module made them. None: as they are.

    Args:
        param: The type in which modules compute.
        reduce: The type in which gradients are summed over devices.
        output: The type of what a root returns, and so of a loss that is computed outside of it.
        in_float32: Patterns of submodules that compute in float32 all the same.
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
            output=torch.float32,  # autocast runs losses in float32, whatever enters them
            in_float32=as_patterns(in_float32),
            autocast=autocast,
        )


STOCK_POLICIES: dict[str, DtypePolicy] = {
    "32-true": DtypePolicy(),
    "bf16-mixed": DtypePolicy.bf16_mixed(autocast=True),
}
