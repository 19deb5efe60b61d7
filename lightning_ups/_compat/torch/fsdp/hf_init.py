"""Letting Hugging Face models initialise themselves on the meta device, where they would skip it."""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from lightning_ups._compat.patches import applied

__all__ = ["InitialisingOnMeta"]


class InitialisingOnMeta:
    """Lets ``PreTrainedModel.init_weights`` do its work on any device, from ``ensure`` until ``end``.

    ``transformers`` may be imported at any moment, and is never imported from here.
    """

    def __init__(self) -> None:
        self._undo: ExitStack | None = None

    def ensure(self) -> None:
        """Begin, if ``transformers`` is there by now."""
        if self._undo is not None or not hasattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel"):
            return  # not imported, or half of it
        self._undo = ExitStack()
        target = "transformers.modeling_utils:PreTrainedModel.init_weights"
        self._undo.enter_context(applied(target, _initializing, once=True))

    def end(self) -> None:
        """Put back what was there."""
        if self._undo is not None:
            self._undo.close()
            self._undo = None


def _initializing(stock: Callable[..., None]) -> Callable[..., None]:
    def init_weights(model: Any, *args: Any, **kwargs: Any) -> None:
        if hasattr(model, "initialize_weights"):
            model.initialize_weights()
        stock(model, *args, **kwargs)  # on meta it only ties

    return init_weights
