"""What models of Hugging Face's transformers do in a forward and Dynamo cannot trace."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ["is_output_hook", "ready_for_one_graph"]

_OUTPUTS = "transformers.utils.output_capturing"


@contextmanager
def ready_for_one_graph(module: nn.Module) -> Iterator[None]:
    """Let Dynamo trace the models of transformers below ``module`` in one graph, while the context is open.

    A model that returns outputs of its layers, such as router logits, installs hooks for them in its first forward,
    under a lock. They are installed now, and do nothing where no outputs are asked for. The feature encoder of a speech
    model makes its input require a gradient, which only its own gradient checkpointing needs.
    """
    install = getattr(sys.modules.get(_OUTPUTS), "maybe_install_capturing_hooks", None)
    encoders = list[Any]()
    for child in module.modules():
        if install is not None and isinstance(child, sys.modules["transformers"].PreTrainedModel):
            install(child)
        if not type(child).__module__.startswith("transformers."):
            continue
        if getattr(child, "_requires_grad", False) is True and not getattr(child, "gradient_checkpointing", False):
            encoders.append(child)
    try:
        for encoder in encoders:
            encoder._requires_grad = False
        yield
    finally:
        for encoder in encoders:
            encoder._requires_grad = True


def is_output_hook(hook: object) -> bool:
    """Return whether ``hook`` collects outputs of a layer for transformers, and does nothing else."""
    return getattr(hook, "__module__", None) == _OUTPUTS
