"""Converts tensors to the names and layout of Transformer Engine's modules, and back.

Runs of this package need neither, since their parameters keep their names. The functions are for weights that come
from, or go to, a model built of Transformer Engine modules. The tensors may be weights, gradients or optimizer moments.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

__all__ = ["Layouts", "from_te_names", "to_te_names"]

Layouts = Mapping[str, Mapping[str, Sequence[str]]]  # module, Transformer Engine's parameter, names in the model


def to_te_names(tensors: Mapping[str, Tensor], layouts: Layouts) -> dict[str, Tensor]:
    """Return ``tensors`` with Transformer Engine's names; weights of one product are stacked along the rows.

    Raises:
        KeyError: If only some of the tensors of one product are present.
    """
    sources = _sources(layouts)
    found = {name: tensor for name, tensor in tensors.items() if name not in {s for of in sources.values() for s in of}}
    for name, parts in sources.items():
        if any(part in tensors for part in parts):
            found[name] = torch.cat([tensors[part] for part in parts]) if len(parts) > 1 else tensors[parts[0]]
    return found


def from_te_names(tensors: Mapping[str, Tensor], layouts: Layouts, *, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return ``tensors`` with the names of the model, without Transformer Engine's own state.

    Args:
        tensors: The tensors, with Transformer Engine's names.
        layouts: The names of each in the model.
        like: The model's tensors, whose sizes determine where joined tensors are split.
    """
    sources, found = _sources(layouts), {}
    for name, tensor in tensors.items():
        if name in sources:
            parts = tensor.split([len(like[part]) for part in sources[name]])
            found |= dict(zip(sources[name], parts, strict=True))
        elif not name.endswith("._extra_state"):
            found[name] = tensor
    return found


def _sources(layouts: Layouts) -> dict[str, Sequence[str]]:
    return {f"{module}.{theirs}": parts for module, layout in layouts.items() for theirs, parts in layout.items()}
