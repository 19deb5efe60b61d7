"""The part of a tensor-parallel model on one device, on fake tensors."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ups.transforms.tensor_parallel import Style

__all__ = ["cut_for_one_device"]

_SEQUENCE, _FEATURES = 1, -1  # of activations [batch, sequence, features]


def cut_for_one_device(model: nn.Module, *, styles: Mapping[str, Style], size: int) -> None:
    """Reduce ``model`` in place to the part on one of ``size`` devices.

    Weights are cut, and hooks give inputs and outputs the shapes that they have on that device. Nothing is exchanged.

    Args:
        model: Its tensors are fake.
        styles: The style of each module, by name.
        size: The number of devices, which divides the weights.
    """
    cut: dict[nn.Parameter, nn.Parameter] = {}  # tied weights are cut once
    for name, style in styles.items():
        module = model.get_submodule(name)
        for own, axis in _axes(module, style).items():
            full = module._parameters[own]
            if full is not None:
                module._parameters[own] = cut.setdefault(full, _part(full, axis=axis, size=size))
        _resize(module, style, size)


def _axes(module: nn.Module, style: Style) -> dict[str, int]:
    """Return the dimension along which torch's styles split each parameter of ``module``."""
    if isinstance(module, nn.Embedding):
        return {"weight": 1 if style.startswith("colwise") else 0}
    if isinstance(module, nn.Linear) and style.startswith("colwise"):
        return {"weight": 0, "bias": 0}
    if isinstance(module, nn.Linear) and style.startswith("rowwise"):
        return {"weight": 1}
    return {}


def _part(full: nn.Parameter, *, axis: int, size: int) -> nn.Parameter:
    shape = [*full.shape]
    shape[axis] //= size
    return nn.Parameter(full.detach().new_empty(shape), requires_grad=full.requires_grad)


def _resize(module: nn.Module, style: Style, size: int) -> None:
    def gathered(x: Tensor, dim: int = _SEQUENCE) -> Tensor:
        return torch.cat([x] * size, dim)

    def split(x: Tensor) -> Tensor:
        return x.narrow(_SEQUENCE, 0, max(x.shape[_SEQUENCE] // size, 1)).clone()

    def into(change: Callable[[Tensor], Tensor]) -> None:
        module.register_forward_pre_hook(lambda _, args: (change(args[0]), *args[1:]))

    def out_of(change: Callable[[Any], Tensor]) -> None:
        module.register_forward_hook(lambda _, __, output: change(output))

    def keyword(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "hidden_states": gathered(kwargs["hidden_states"])}

    if style == "split_sequence":
        into(split)
    elif style in ("gather_sequence", "colwise_from_sequence"):
        into(gathered)
    elif style == "gather_hidden_states":
        module.register_forward_pre_hook(keyword, with_kwargs=True)
    if style in ("rowwise_to_sequence", "embedding_to_sequence"):
        out_of(split)
    elif style in ("colwise_gathered", "colwise_from_sequence"):
        out_of(lambda x: gathered(x, _FEATURES))
