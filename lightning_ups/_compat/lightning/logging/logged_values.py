"""Where Lightning keeps what was logged.

At each call of ``self.log``, of a step that no logger asks for too, it brings the value's record to the value's device:
a walk through all that the record holds, with a deep copy of the call's options. Once the record is there nothing of
it changes, and it takes a fifth of what a Trainer costs the host in a step, for each value that is logged.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric
from torch import Tensor

from lightning_ups._compat.patches import applied

__all__ = ["moved_if_elsewhere"]


def moved_if_elsewhere() -> AbstractContextManager[None]:
    """Leave a record in the context where it is, if all of it is on the device already."""
    target = "lightning.pytorch.trainer.connectors.logger_connector.result:_ResultMetric.to"
    return applied(target, _moving, once=True)


def _moving(stock: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(stock)
    def to(self: _ResultMetric, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and self.is_tensor and _is_on(self, args[0]):
            return self
        return stock(self, *args, **kwargs)

    return to


def _is_on(metric: _ResultMetric, device: Any) -> bool:
    if type(device) is not torch.device:
        return False
    # The one container among them that holds tensors has what a reset begins from.
    held = [*vars(metric).values(), *metric._defaults.values()]
    return all(value.device == device for value in held if isinstance(value, Tensor))
