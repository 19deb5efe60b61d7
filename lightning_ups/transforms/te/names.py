"""Tensors under the names and in the layout of Transformer Engine's modules, and back.

A run of this package needs neither: its parameters keep their names. They are for weights that come from, or go to, a
model that is built of Transformer Engine's modules. The tensors may be weights, their gradients or an optimizer's
averages of them.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

__all__ = ["Layouts", "from_te_names", "te_name_of", "to_te_names"]

Layouts = Mapping[str, Mapping[str, Sequence[str]]]  # module, parameter of Transformer Engine, names in the model


def to_te_names(tensors: Mapping[str, Tensor], layouts: Layouts) -> dict[str, Tensor]:
    """Return ``tensors`` under Transformer Engine's names, with those of one product one below the other.

    Raises:
        KeyError: If only some of the tensors of one product are there.
    """
    sources = _sources(layouts)
    found = {name: tensor for name, tensor in tensors.items() if name not in {s for of in sources.values() for s in of}}
    for name, parts in sources.items():
        if any(part in tensors for part in parts):
            found[name] = torch.cat([tensors[part] for part in parts]) if len(parts) > 1 else tensors[parts[0]]
    return found


def from_te_names(tensors: Mapping[str, Tensor], layouts: Layouts, *, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return ``tensors`` under the names of the model; Transformer Engine's own state is left out.

    Args:
        tensors: By Transformer Engine's names.
        layouts: Where each comes from.
        like: The model's tensors, whose lengths say where to part what is joined.
    """
    sources, found = _sources(layouts), {}
    for name, tensor in tensors.items():
        if name in sources:
            parts = tensor.split([len(like[part]) for part in sources[name]])
            found |= dict(zip(sources[name], parts, strict=True))
        elif not name.endswith("._extra_state"):
            found[name] = tensor
    return found


def te_name_of(name: str, layouts: Layouts) -> str:
    """Return the name of the parameter of Transformer Engine in which ``name`` is."""
    return next((theirs for theirs, parts in _sources(layouts).items() if name in parts), name)


def _sources(layouts: Layouts) -> dict[str, Sequence[str]]:
    return {f"{module}.{theirs}": parts for module, layout in layouts.items() for theirs, parts in layout.items()}
