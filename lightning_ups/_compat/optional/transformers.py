"""Prepares models of Hugging Face's transformers for Dynamo."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_OUTPUTS, _INSTALL = "transformers.utils.output_capturing", "maybe_install_capturing_hooks"
_INSTALLED = "_output_capturing_hooks_installed"


@contextmanager
def ready_for_one_graph(module: nn.Module) -> Iterator[None]:
    """Let Dynamo trace the models of transformers below ``module`` in one graph, while the context is open.

    A model that returns outputs of its layers, such as router logits, installs hooks for them in its first forward,
    under a lock. They are installed now, and do nothing unless outputs are requested. The feature encoder of a speech
    model makes its input require a gradient, which only its own gradient checkpointing needs.
    """
    outputs: Any = sys.modules.get(_OUTPUTS)
    kind: Any = sys.modules["transformers"].PreTrainedModel if hasattr(outputs, _INSTALL) else ()
    models = [child for child in module.modules() if isinstance(child, kind) and not vars(child).get(_INSTALLED)]
    encoders: list[Any] = [
        child
        for child in module.modules()
        if type(child).__module__.startswith("transformers.")
        and vars(child).get("_requires_grad") is True
        and not vars(child).get("gradient_checkpointing")
    ]
    before = {child: {*child._forward_hooks} for model in models for child in model.modules()}
    try:
        for model in models:
            outputs.maybe_install_capturing_hooks(model)
        for encoder in encoders:
            encoder._requires_grad = False
        yield
    finally:
        for encoder in encoders:
            encoder._requires_grad = True
        # A model with these hooks cannot be pickled.
        for child, kept in before.items():
            for number, hook in [*child._forward_hooks.items()]:
                if number not in kept and is_output_hook(hook):
                    del child._forward_hooks[number]
        for model in models:
            setattr(model, _INSTALLED, False)


def is_output_hook(hook: object) -> bool:
    """Return whether ``hook`` only collects outputs of a layer for transformers."""
    return getattr(hook, "__module__", None) == _OUTPUTS
