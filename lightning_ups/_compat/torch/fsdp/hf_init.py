"""Letting Hugging Face models initialise themselves on the meta device, where they would skip it."""

import sys
from typing import Any

__all__ = ["InitialisingOnMeta"]


class InitialisingOnMeta:
    """Lets ``PreTrainedModel.init_weights`` do its work on any device, from ``ensure`` until ``end``.

    ``transformers`` may be imported at any moment, and is never imported from here.
    """

    def __init__(self) -> None:
        self._kind: Any = None
        self._original: Any = None

    def ensure(self) -> None:
        """Begin, if ``transformers`` is there by now."""
        if self._kind is not None or (modeling := sys.modules.get("transformers.modeling_utils")) is None:
            return
        kind = getattr(modeling, "PreTrainedModel", None)
        if kind is None:  # it is being imported
            return
        original = kind.init_weights

        def init_weights(model: Any) -> None:
            if hasattr(model, "initialize_weights"):
                model.initialize_weights()
            original(model)  # on meta it only ties

        self._kind, self._original = kind, original
        kind.init_weights = init_weights

    def end(self) -> None:
        """Put back what was there."""
        if self._kind is not None:
            self._kind.init_weights = self._original
            self._kind = None
