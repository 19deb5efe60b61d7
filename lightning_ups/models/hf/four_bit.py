"""Frozen linear layers of 4 bits, for adapters on large models (QLoRA)."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from typing_extensions import override

from lightning_ups._compat.optional.packages import require
from lightning_ups._compat.torch.fsdp.recording import recording, replay
from lightning_ups._compat.torch.tensors.custom_ops import define_operator

_BLOCK = 64  # weights that share a scale
_SCALES = "scales"


def in_four_bits(make: Callable[[], Any], *, device: torch.device) -> Any:
    """Return the model that ``make`` builds, with the weights of its hidden linear layers in 4 bits (NF4).

    Tensors are read or drawn on ``device`` one at a time, so that the model is never there in full. Under
    ``torch.device("meta")`` weights stay there, and bitsandbytes is not needed.

    Args:
        make: Returns a model of transformers, on the default device.
        device: For the model.

    Raises:
        ModuleNotFoundError: If bitsandbytes is missing.
    """
    if torch.get_default_device().type == "meta":
        model = make()
        for name, layer in _hidden_layers(model).items():
            model.set_submodule(name, FourBitLinear(layer, *_quantize_meta(layer.weight)))
        return model
    _library()
    with torch.device("meta"), recording() as record:
        model = make()
    layers, loose = _hidden_layers(model), record.loose(model)
    places = record.places(model)
    made: dict[Any, nn.Parameter] = {}  # tied ones are one
    small: dict[str, tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def keep(name: str, whole: Tensor) -> None:
        if name in loose:
            loose[name].holder[loose[name].key] = whole.to(device, copy=True)
            return
        owner, _, last = name.rpartition(".")
        module = model.get_submodule(owner)
        if last == "weight" and owner in layers:
            small[owner] = quantize(whole)
        elif last in module._buffers:
            module._buffers[last] = whole
        else:
            made.setdefault(places[name], nn.Parameter(whole))
            module._parameters[last] = made[places[name]]

    missing = replay(record, {name: each.place for name, each in loose.items()} | places, keep, device=device)
    if missing:
        raise ValueError(f"four_bit=True cannot build {type(model).__name__}: no value is recorded for {missing[:3]}.")
    for name, layer in layers.items():
        model.set_submodule(name, FourBitLinear(layer, *small[name]))
    return model


class FourBitLinear(nn.Linear):
    """A linear layer whose weight is 4 bits a number. It is dequantized in each forward and backward, and frozen.

    Attributes:
        weight: uint8 [out, in / 2], two numbers in each.
        scales: The float32 scale of each block of 64 numbers, as bytes: a cast of the model does not change them.
    """

    def __init__(self, like: nn.Linear, weight: Tensor, scales: Tensor) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = like.in_features, like.out_features, like.bias
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)

    @override
    def forward(self, input: Tensor) -> Tensor:
        kind = input.device.type
        if torch.is_autocast_enabled(kind):
            input = input.to(torch.get_autocast_dtype(kind))
        output = _Product.apply(input, self.weight, self.scales)
        return output if self.bias is None else output + self.bias.to(output.dtype)


class _Product(torch.autograd.Function):
    """The product with a 4-bit weight, of which only the 4 bits are kept for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
        ctx.save_for_backward(weight, scales)
        return F.linear(x, dequantize(weight, scales, x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient @ dequantize(*ctx.saved_tensors, gradient.dtype), None, None


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight [out, in] in 4 bits, and the bytes of its scales."""
    packed, scales = _library().functional.quantize_4bit(weight, blocksize=_BLOCK, quant_type="nf4")
    return packed.view(len(weight), -1), scales.absmax.view(torch.uint8)


def full_weights(weights: Mapping[str, Tensor], *, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Return a state dict with its 4-bit weights dequantized."""
    scales = {name.removesuffix(_SCALES) + "weight": name for name in weights if name.endswith("." + _SCALES)}
    return {
        name: dequantize(tensor, weights[scales[name]], dtype) if name in scales else tensor
        for name, tensor in weights.items()
        if name not in scales.values()
    }


def _dequantize(weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    if "bitsandbytes" not in sys.modules:  # of a loaded checkpoint; `require` takes long
        _library()
    shape = weight.shape[0], weight.shape[1] * 2
    packed = weight.view(-1, 1)
    return torch.ops.bitsandbytes.dequantize_4bit(packed, scales.view(torch.float32), _BLOCK, "nf4", shape, dtype)


def _dequantized_shape(weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:  # noqa: ARG001
    return weight.new_empty((weight.shape[0], weight.shape[1] * 2), dtype=dtype)


# An operator of its own: a plan needs no bitsandbytes.
dequantize = define_operator(_dequantize, name="dequantize_nf4", fake=_dequantized_shape)


def _quantize_meta(weight: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = weight.shape
    sizes = (rows, columns // 2), (rows * columns // _BLOCK * 4,)
    packed, scales = (torch.empty(size, dtype=torch.uint8, device="meta") for size in sizes)
    return packed, scales


def _hidden_layers(model: Any) -> dict[str, nn.Linear]:
    """Return the linear layers below the head whose weights have full blocks."""
    heads = {*model.modules()} - {*model.base_model.modules()} | {model.get_output_embeddings()}
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module not in heads and module.in_features % _BLOCK == 0
    }


def _library() -> Any:
    return require("bitsandbytes", requirement="bitsandbytes>=0.46", extra="four_bit", feature="four_bit=True")
