"""Letting Hugging Face models initialise themselves on the meta device, where they would skip it."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["initialising_on_meta"]


@contextmanager
def initialising_on_meta() -> Iterator[None]:
    """Let ``PreTrainedModel.init_weights`` do its work on any device while the context is open.

    Only if ``transformers`` is imported already, as it is where a module of the user's imports it at its top.
    """
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None:
        yield
        return
    kind = modeling.PreTrainedModel
    original = kind.init_weights

    def init_weights(self: Any) -> None:
        if hasattr(self, "initialize_weights"):
            self.initialize_weights()
        original(self)  # on meta it only ties

    kind.init_weights = init_weights
    try:
        yield
    finally:
        kind.init_weights = original
