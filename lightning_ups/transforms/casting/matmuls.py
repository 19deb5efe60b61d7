"""Finds weights of matrix products: those that autocast casts in every forward, and those of no linear layer."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

_WEIGHT_AND_BIAS = ("weight", "bias")
_CELL = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")

# Keyed by forward, so that a subclass counts if it inherits the forward: its own forward might use the weight in any
# way. Without nn.Bilinear, which autocast leaves in float32. `bias_k` and `bias_v` of attention enter no product.
_USED_BY: dict[Callable[..., Any], tuple[str, ...]] = {
    nn.Linear.forward: _WEIGHT_AND_BIAS,
    nn.Conv1d.forward: _WEIGHT_AND_BIAS,
    nn.Conv2d.forward: _WEIGHT_AND_BIAS,
    nn.Conv3d.forward: _WEIGHT_AND_BIAS,
    nn.ConvTranspose1d.forward: _WEIGHT_AND_BIAS,
    nn.ConvTranspose2d.forward: _WEIGHT_AND_BIAS,
    nn.ConvTranspose3d.forward: _WEIGHT_AND_BIAS,
    nn.RNNCell.forward: _CELL,
    nn.LSTMCell.forward: _CELL,
    nn.GRUCell.forward: _CELL,
    nn.MultiheadAttention.forward: (
        "in_proj_weight",
        "q_proj_weight",
        "k_proj_weight",
        "v_proj_weight",
        "in_proj_bias",
    ),
}
_RECURRENT = (nn.RNN.forward, nn.LSTM.forward, nn.GRU.forward)


def matmul_weights(model: nn.Module) -> list[tuple[str, str]]:
    """Return (module name, parameter name) for each float32 parameter that only products and convolutions use.

    A parameter shared with another kind of module, such as an embedding, is left out; one shared by several modules of
    these kinds is listed for each.
    """
    found: list[tuple[str, str, nn.Parameter]] = []
    used_otherwise: set[nn.Parameter] = set()
    for owner, module in model.named_modules():
        names = _names_in(module)
        for name, parameter in module.named_parameters(recurse=False):
            if name in names and parameter.dtype is torch.float32:
                found.append((owner, name, parameter))
            else:
                used_otherwise.add(parameter)
    return [(owner, name) for owner, name, parameter in found if parameter not in used_otherwise]


def _names_in(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the parameters of ``module`` itself that its matrix products use."""
    forward = type(module).forward
    if forward in _RECURRENT:
        return tuple(name for names in module._all_weights for name in names)  # type: ignore[union-attr]
    if type(module).__module__.startswith("transformers."):
        if type(module).__name__ == "Conv1D":
            return _WEIGHT_AND_BIAS
        if _multiplies_expert_by_expert(module):
            return tuple(name for name, p in module.named_parameters(recurse=False) if p.dim() == 3)
    return _USED_BY.get(forward, ())


def _multiplies_expert_by_expert(module: nn.Module) -> bool:
    # The other implementations are not autocast (`grouped_mm` runs in float32), or sum the gradients of an expert in
    # the dtype of its weight.
    implementation = getattr(getattr(module, "config", None), "_experts_implementation", None)
    return implementation == "eager" and type(module).__name__.endswith("Experts")


def name_other_layers(module: nn.Module) -> str:
    """Return a sentence that lists the classes with most weight matrices that are not linear, or an empty string."""
    weights, layers = Counter[str](), Counter[str]()
    for m in module.modules():
        if isinstance(m, (nn.Linear, nn.Embedding, nn.EmbeddingBag)):
            continue
        own = [p for name, p in m._parameters.items() if p is not None and "weight" in name and not is_lazy(p)]
        if count := sum(p.numel() for p in own if p.dim() == 2):
            name = f"{type(m).__module__}.{type(m).__qualname__}"
            weights[name] += count
            layers[name] += 1
    most = [f"{name} ({layers[name]} of them, {count:,} weights)" for name, count in weights.most_common(3)]
    return f" Layers that are no nn.Linear are not converted: {', '.join(most)}." if most else ""
