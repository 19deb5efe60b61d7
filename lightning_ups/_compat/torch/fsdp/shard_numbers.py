"""Numbers that are found of sharded tensors, such as the norm of a gradient, where Lightning takes them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_ups._compat.patches import applied
from lightning_ups._compat.torch.tensors.tensors import whole_of

__all__ = ["taken_whole"]


@contextmanager
def taken_whole() -> Iterator[None]:
    """Let Lightning take numbers of shards, too, while the context is open.

    `LightningModule.log` would keep a ``DTensor``, which `EarlyStopping` cannot print and a checkpoint cannot hold, and
    `lightning.pytorch.utilities.grad_norm` makes one tensor of all norms, which torch cannot do with these.
    """
    with (
        applied("lightning.pytorch:LightningModule._LightningModule__to_tensor", _logging),
        applied("lightning.pytorch.utilities.grads:torch", lambda _: _Torch()),
    ):
        yield


def _logging(stock: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(stock)
    def to_tensor(self: LightningModule, value: Any, *rest: Any) -> Any:
        return stock(self, whole_of(value.detach()) if isinstance(value, DTensor) else value, *rest)

    return to_tensor


class _Torch(SimpleNamespace):
    """Torch, as a module of Lightning sees it."""

    def tensor(self, values: Sequence[Any], **options: Any) -> Tensor:
        return torch.tensor([whole_of(v) if isinstance(v, DTensor) else v for v in values], **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)
