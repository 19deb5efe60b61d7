"""Models of Hugging Face's transformers: built from a config, or read tensor by tensor into what shards hold."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ups._compat.optional.packages import require
from lightning_ups._compat.optional.transformers import imported, read_on_meta
from lightning_ups.transforms.patching import instead_of


def from_config(
    config: str | Mapping[str, Any],
    options: Mapping[str, Any],
    *,
    auto: str = "AutoModelForCausalLM",
    changed: Mapping[str, Any] | None = None,
    of: str = "HFCausalLM",
) -> Any:
    """Return a model with random weights.

    Args:
        config: A folder, a name on the Hub, or the content of a ``config.json``.
        options: Of ``from_config`` of the class ``auto``.
        auto: A class of transformers.
        changed: Values in place of those of the config.
        of: Who asks, for an error.
    """
    transformers, changed = imported(), changed or {}
    if isinstance(config, Mapping):
        found = transformers.AutoConfig.for_model(**{**config, **changed})
    else:
        with _refusing_unknown("config", config, of=of):
            found = transformers.AutoConfig.from_pretrained(config, **changed)
    return getattr(transformers, auto).from_config(found, **options)


def from_pretrained(
    path: str, options: Mapping[str, Any], *, auto: str = "AutoModelForCausalLM", of: str = "HFCausalLM"
) -> Any:
    """Return a model with its trained weights.

    Under ``torch.device("meta")`` weights stay there, and what reads them is recorded, as what a constructor draws.

    Args:
        path: A folder, or a name on the Hub.
        options: Of ``from_pretrained`` of the class ``auto``.
        auto: A class of transformers.
        of: Who asks, for an error.
    """
    load = getattr(imported(), auto).from_pretrained
    with _refusing_unknown("pretrained", path, of=of):
        if torch.get_default_device().type == "meta":
            return read_on_meta(load, path, **options)
        return load(path, **options)


@contextmanager
def _refusing_unknown(argument: str, path: str, *, of: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        first = str(error).partition("\n")[0]
        raise FileNotFoundError(
            f"{of}({argument}={path!r}) names no model that can be read: {first}"
            " Without a network, name a folder with config.json and the weights in safetensors, as save_pretrained"
            " writes it."
        ) from error


def with_adapters(model: Any, lora: Mapping[str, Any], *, task: str | None) -> Any:
    """Return ``model`` as PEFT's model with new adapters, by the arguments of ``LoraConfig``."""
    peft = require("peft", requirement="peft>=0.14", extra="hf", feature="lora=...")
    return peft.get_peft_model(model, peft.LoraConfig(task_type=task, **lora))


def has_plain_head(model: Any) -> bool:
    """Return whether the logits of ``model`` are the product of its last hidden states and its head's weight.

    The model runs with a stand-in for its layers, to see whether anything else is done to hidden states or logits.
    """
    head, layers = model.get_output_embeddings(), model.base_model
    seen: list[tuple[Any, Any]] = []
    balanced = getattr(model.config.get_text_config(), "output_router_logits", False)  # by a loss that the model adds
    if type(head) is not nn.Linear or head.bias is not None or layers is model or balanced:
        return False
    hidden = head.weight.new_empty(1, 1, head.in_features)
    tokens = torch.zeros(1, 1, dtype=torch.long, device=hidden.device)
    with instead_of(layers, "forward", lambda *_, **__: _OnlyHidden(hidden)), torch.no_grad(), _watched(head, seen):
        try:
            logits = model(input_ids=tokens).logits
        except Exception:  # noqa: BLE001 (a forward that wants more than this is not plain)
            return False
    ((given, made),) = seen
    same = given.untyped_storage()._cdata == hidden.untyped_storage()._cdata and made is logits
    return same and not hidden._version and not logits._version


class _OnlyHidden:
    """The output of layers, of any kind, without anything but hidden states."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, place: int) -> Tensor:
        return self.last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None


@contextmanager
def _watched(head: nn.Module, seen: list[tuple[Any, Any]]) -> Iterator[None]:
    handle = head.register_forward_hook(lambda _, given, made: seen.append((given[0], made)))
    try:
        yield
    finally:
        handle.remove()
