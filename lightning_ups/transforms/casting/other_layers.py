"""Layers with weight matrices that are not linear layers, which conversions do not convert."""

from collections import Counter

from torch import nn
from torch.nn.parameter import is_lazy

__all__ = ["name_other_layers"]


def name_other_layers(module: nn.Module) -> str:
    """Return a sentence that lists the classes with most of these weights, or an empty string."""
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
