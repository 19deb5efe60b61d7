"""Copies of a module as its author wrote it: without the hooks, compilation, conversion and sharding of a run."""

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torchmetrics import Metric, MetricCollection
from typing_extensions import override

from lightning_ups._compat.torch.tensors.autograd import in_backward
from lightning_ups.insight.dry_run.copies import FakeCopies, MetricPlaceholder
from lightning_ups.insight.dry_run.known_values import KnownValues


class PlainCopies(FakeCopies):
    """Copies to the meta device in float32, since casts cost no FLOPs, and remembers the values of small tensors.

    On the meta device, since Hugging Face models take fake tensors for tracing and then use another attention mask.
    """

    def __init__(self) -> None:
        super().__init__()
        self.known = KnownValues()
        self._float8: list[_Float8Linear] = []

    @property
    def float8_flops(self) -> int:
        """FLOPs of the layers that were converted to float8, in the steps that have run."""
        return sum(layer.flops for layer in self._float8)

    @override
    def close(self) -> None:
        super().close()
        self.known.clear()

    @override
    def tensor(self, tensor: Tensor) -> Tensor:
        dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
        fake = torch.empty(tensor.shape, dtype=dtype, device=self.device)
        if isinstance(tensor, nn.Parameter):
            fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
        self.known.add(fake, tensor)
        return fake

    @override
    def module(self, module: nn.Module) -> Any:
        if isinstance(inner := vars(module).get("_modules", {}).get("_orig_mod"), nn.Module):
            return self.copy_now(inner)  # torch.compile(module) was called
        if isinstance(module, Metric):
            return MetricPlaceholder()
        if isinstance(module, MetricCollection):
            return super().module(module)
        if any(base.__name__ == "Float8Linear" for base in type(module).__mro__):
            self._float8.append(layer := _Float8Linear(*(self.copy_now(each) for each in (module.weight, module.bias))))
            return layer
        if hasattr(type(module), "__del__"):
            return self.not_copied(module, "whose __del__ would close what it holds")
        kind = type(module)
        if isinstance(module, FSDPModule):
            kind = next(k for k in kind.__mro__ if not issubclass(k, FSDPModule))
        return self.shell(module, kind)

    @override
    def attributes(self, value: Any) -> dict[str, Any]:
        found = super().attributes(value)
        kept = {
            name: type(inner)() if _is_hooks(name, inner) else inner
            for name, inner in found.items()
            if name not in ("forward", "_compiled_call_impl") or not isinstance(value, nn.Module)
        }
        if isinstance(value, nn.Module) and (forward := self._forward_of(value, found.get("forward"))) is not None:
            kept["forward"] = forward
        return kept

    def _forward_of(self, module: nn.Module, replaced: Any) -> Any:
        """Return the forward to keep of those on the instance: recomputation, which is work, or the user's own."""
        while (inner := getattr(replaced, "__wrapped__", None)) is not None:
            function = getattr(replaced, "__func__", None)
            if function is not None and function.__module__ == "lightning_ups.transforms.recompute.wrapping":
                self.keep(function, function)
                return MethodType(function, module)
            replaced = inner
        is_others = isinstance(replaced, MethodType) and replaced.__self__ is not module
        return None if is_others else replaced


def _is_hooks(name: str, value: Any) -> bool:
    return isinstance(value, dict) and name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called"))


class _Float8Linear(nn.Module):
    """A linear layer that counts its own FLOPs, since they are computed in float8."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.weight, self.bias, self.flops = weight, bias, 0
        self.out_features, self.in_features = weight.shape

    @override
    def forward(self, x: Tensor) -> Tensor:
        if not in_backward():  # recomputed
            gradients = (x.requires_grad + self.weight.requires_grad) if torch.is_grad_enabled() else 0
            self.flops += 2 * x.numel() * self.out_features * (1 + gradients)
        return nn.functional.linear(x, self.weight, self.bias)
