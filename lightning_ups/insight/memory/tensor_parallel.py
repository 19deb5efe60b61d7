"""What one of the devices has of a model whose matrix products are split over several: for counting, on fakes."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ups.transforms.tensor_parallel import Style

__all__ = ["cut_for_one_device"]

_SEQUENCE, _FEATURES = 1, -1  # of activations [batch, sequence, features]


def cut_for_one_device(model: nn.Module, *, styles: Mapping[str, Style], size: int) -> None:
    """Make of ``model``, in place, what one of ``size`` devices has of it.

    Weights are cut, and hooks bring what enters and leaves a module to the size that it has there. Nothing is
    exchanged: what is gathered is as large as if it were, in forward and in backward, and its numbers mean nothing.

    Args:
        model: Its tensors have no numbers.
        styles: How its modules are split, by name.
        size: Over how many devices, which divides the weights.
    """
    cut: dict[nn.Parameter, nn.Parameter] = {}  # a tied one is cut once
    for name, style in styles.items():
        module = model.get_submodule(name)
        for own, axis in _axes(module, style).items():
            whole = module._parameters[own]
            if whole is not None:
                module._parameters[own] = cut.setdefault(whole, _part(whole, axis=axis, size=size))
        _resize(module, style, size)


def _axes(module: nn.Module, style: Style) -> dict[str, int]:
    """Return along which dimension each parameter of ``module`` is split, as torch's styles do it."""
    if isinstance(module, nn.Embedding):
        return {"weight": 1 if style.startswith("colwise") else 0}
    if isinstance(module, nn.Linear) and style.startswith("colwise"):
        return {"weight": 0, "bias": 0}
    if isinstance(module, nn.Linear) and style.startswith("rowwise"):
        return {"weight": 1}
    return {}


def _part(whole: nn.Parameter, *, axis: int, size: int) -> nn.Parameter:
    shape = [*whole.shape]
    shape[axis] //= size
    return nn.Parameter(whole.detach().new_empty(shape), requires_grad=whole.requires_grad)


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
