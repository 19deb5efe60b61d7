"""Large matrices that no block holds, such as a head, and that are worth collectives of their own."""

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import dropwhile

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from lightning_ups.transforms.forward import has_replaced_forward

__all__ = ["find_apart", "owner_of"]

LEAST = 2**22  # elements: gathering less takes hardly longer than beginning to


def find_apart(model: nn.Module, *, blocks: Iterable[nn.Module], roots: Iterable[nn.Module]) -> dict[str, nn.Module]:
    """Return the linear layers and embeddings by name that are large, in no block, and come after one in their root.

    What a root holds besides is gathered when the root is called, while nothing else runs, and reduced when all else
    has been. A head that is gathered with it waits for every block, twice. What comes before the blocks gains nothing:
    it is gathered at once by itself, too, and reduced last. Of what shares its parameters nothing is returned, nor of
    what is compiled or recomputed as one: hooks in its midst would cut a graph in pieces.

    Args:
        model: What is trained.
        blocks: Modules that are gathered one by one.
        roots: Modules that gather what no block in them holds.
    """
    blocks, roots = {*blocks}, [*roots]
    inside = {inner for block in blocks for inner in block.modules()}
    as_one = [module for module in model.modules() if has_replaced_forward(module) and module not in roots]
    inside |= {inner for module in as_one for inner in module.modules() if inner is not module}
    holders = Counter(p for module in model.modules() for p in module.parameters(recurse=False))
    found = {
        module
        for root in roots
        if root not in inside
        for module in dropwhile(lambda each: each not in blocks, root.modules())
        if module not in inside and _is_called_layer(module) and _is_large(module, holders)
    }
    return {name: module for name, module in model.named_modules() if module in found}


def _is_called_layer(module: nn.Module) -> bool:
    # The product at the end of torch's attention is read by what it is in, and not called.
    known = isinstance(module, nn.Linear | nn.Embedding) and not isinstance(module, NonDynamicallyQuantizableLinear)
    return known and next(module.children(), None) is None


def _is_large(module: nn.Module, holders: Mapping[nn.Parameter, int]) -> bool:
    own = [*module.parameters(recurse=False)]
    return sum(p.numel() for p in own) >= LEAST and all(holders[p] == 1 for p in own)


def owner_of(model: nn.Module, name: str) -> nn.Module:
    """Return the innermost sharded module around the one that ``name`` stands for: it would gather it otherwise."""
    while name:
        name = name.rpartition(".")[0]
        if name and isinstance(outer := model.get_submodule(name), FSDPModule):
            return outer
    return model
