"""Weights that FSDP2 gathers in float8: their scales, and the plain tensors that state dicts contain instead.

Torchao makes such a weight a tensor subclass that casts itself before it is gathered. The scale is computed from the
largest value of the whole weight, which takes a reduction: one for all weights, after each step.
"""

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_ups._compat.optional.packages import require
from lightning_ups._compat.torch.tensors.autograd import outside_function_modes
from lightning_ups._compat.torch.tensors.tensors import local_of, plain_memory


class Scales:
    """The scales of float8 weights, computed together, and again when weights have changed."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self._layers = nn.ModuleList(layer for layer in layers if gathers_in_float8(layer))
        self._of: list[int] | None = None

    def __len__(self) -> int:
        return len(self._layers)

    def compute(self) -> None:
        """Compute all scales; every rank must call this."""
        if self._layers:
            with outside_function_modes():  # modes that watch reads of weights confuse these DTensors with theirs
                _torchao().precompute_float8_dynamic_scale_for_fsdp(self._layers)
            self._of = self._versions()

    def refresh(self) -> None:
        """Compute the scales if a weight was written to since, for example by a callback that swaps weights."""
        if self._layers and self._of != self._versions():
            self.compute()

    def _versions(self) -> list[int]:
        return [layer.weight._version for layer in self._layers]  # type: ignore[union-attr]


@cache  # called in each step; looking up what is installed takes about half a millisecond
def _torchao() -> Any:
    return require("torchao.float8", requirement="torchao>=0.17", extra="float8", feature="Float8Precision")


def gathers_in_float8(layer: nn.Module) -> bool:
    """Return whether FSDP2 gathers the weight of ``layer`` in float8."""
    return _inner(local_of(getattr(layer, "weight", None))) is not None


def show_plain_weight(layer: nn.Module) -> None:
    """Let state dicts of ``layer`` contain its weight as a plain tensor with the same memory."""
    layer.register_state_dict_post_hook(_show_plain)


def _show_plain(_: nn.Module, state: dict[str, Any], prefix: str, __: Mapping[str, Any]) -> None:
    weight = state.get(f"{prefix}weight")
    inner = _inner(local_of(weight))
    if inner is None or isinstance(weight, nn.Parameter):  # the caller wants the Parameter itself
        return
    inner = inner.detach()
    if isinstance(weight, DTensor):
        inner = DTensor.from_local(
            inner, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
        )
    state[f"{prefix}weight"] = inner


def _inner(local: Tensor | None) -> Tensor | None:
    inner = plain_memory(local)
    return None if inner is local else inner
