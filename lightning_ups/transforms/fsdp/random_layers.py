"""Layers that a model skips at random, each device by random numbers of its own."""

from collections.abc import Iterator

from torch import nn

__all__ = ["layer_drop"]

_NAMES = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")  # as models of transformers have it


def layer_drop(model: nn.Module) -> str | None:
    """Return what says that ``model`` skips layers in training, such as ``net.config.layerdrop=0.1``, or None."""
    return next(_rates(model), None)


def _rates(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        for owner, holder in (("", module), ("config.", vars(module).get("config"))):
            for rate in _NAMES:
                value = getattr(holder, "__dict__", {}).get(rate)
                if isinstance(value, float) and value > 0:
                    yield f"{name}.{owner}{rate}={value:g}".lstrip(".")
