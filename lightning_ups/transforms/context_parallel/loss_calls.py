"""The loss from gathered hidden states: each rank computes that of its rows."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_ups.transforms.context_parallel.parts import average, split


def loss_by_rows(
    function: Callable[..., Tensor], group: ProcessGroup, is_whole: Callable[[int], bool]
) -> Callable[..., Tensor]:
    """Return ``function``, this package's `linear_cross_entropy`, divided over ``group``.

    Args:
        function: The function.
        group: The ranks, which call it with the same tensors.
        is_whole: Whether a call with so many positions has gathered hidden states.
    """

    def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
        is_mean = options.get("reduction", "mean") == "mean"
        if hidden.dim() != 3 or not is_mean or not is_whole(hidden.shape[1]):
            return function(hidden, weight, targets, **options)
        own = split(targets, group)
        loss = function(split(hidden, group), weight, own, **options)
        return average(loss, (own != options.get("ignore_index", -100)).sum(), group)

    return linear_cross_entropy
