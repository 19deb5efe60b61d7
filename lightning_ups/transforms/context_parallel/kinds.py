"""What context parallelism knows of models: this package's GPT, decoders of transformers, and named modules."""

import inspect
from typing import Any

from torch import nn
from typing_extensions import override

_KERNELS = ("sdpa", "lightning_ups")  # of transformers, which call torch's attention or this package's
_LAYERS = {"full_attention", "sliding_attention"}
_LIMITS = ("sliding_window", "attention_chunk_size")  # of a config: the furthest key that a token sees


class Kind:
    """How a module runs on parts of the sequence; of one that the user has named, nothing else is known."""

    targets: str | None = None  # a scalar output is the mean over the values of this argument that are not -100
    needs_trial = True  # whether results have to be compared with those of whole sequences

    def adapt(self, name: str, module: nn.Module, given: dict[str, Any], length: int) -> bool:
        """Change the arguments ``given`` of a call, in place, and return whether the call is split.

        Raises:
            ValueError: If the result would be wrong.
        """
        return True


class OurGPT(Kind):
    """This package's GPT: its rotation starts at the first position of a part, and its loss is averaged."""

    targets, needs_trial = "targets", False

    @override
    def adapt(self, name: str, module: nn.Module, given: dict[str, Any], length: int) -> bool:
        longest: int = module.config.max_seq_len  # type: ignore[union-attr]
        if length > longest:
            raise ValueError(
                f"A sequence of {length} tokens is longer than max_seq_len={longest} of {name}."
                " Use shorter sequences, or a model with a larger max_seq_len."
            )
        return True


class Transformers(Kind):
    """The trunk of a causal decoder of transformers, without its head."""

    needs_trial = False

    def check(self, name: str, module: nn.Module) -> None:
        """Raise if ``module``, called ``name``, cannot run on parts of the sequence."""
        whole: Any = module
        config: Any = whole.config.get_text_config()
        rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
        others = {*(getattr(config, "layer_types", None) or ())} - _LAYERS
        if config._attn_implementation not in _KERNELS:
            why = f"its attn_implementation is {config._attn_implementation!r}; use 'sdpa'"
        elif whole._is_stateful or others or config.is_encoder_decoder:
            why = (
                f"it has {', '.join(sorted(others)) or 'a state or an encoder'}, which context parallelism cannot split"
            )
        elif any(kind in str(rope) for kind in ("dynamic", "longrope")):
            why = "its rotary frequencies depend on the length of the sequence, and ranks would use different ones"
        elif "position_ids" not in _parameters(module):
            why = "its forward takes no position_ids, so that each rank would count positions from 0"
        else:
            return
        raise ValueError(
            f"FSDP2Strategy(context_parallel_size) cannot split {name} ({type(module).__name__}): {why}."
            " Otherwise leave context_parallel_size out."
        )

    @override
    def adapt(self, name: str, module: nn.Module, given: dict[str, Any], length: int) -> bool:
        if given.get("past_key_values") is not None:
            return False  # generation
        config: Any = module.config.get_text_config()  # type: ignore[union-attr, operator]
        if given.get("kwargs", {}).get("documents") is None:
            if given.get("position_ids") is not None:
                raise ValueError(
                    f"{name} is given position_ids under context parallelism. Transformers finds documents in them,"
                    " which it could not in a part of a row. Leave them out, or use HFCausalLM with packed batches and"
                    " without options={'attn_implementation': ...}."
                )
            limits = [limit for each in _LIMITS if isinstance(limit := getattr(config, each, None), int)]
            if limits and length > min(limits):
                raise ValueError(
                    f"{name} has a window of {min(limits)} tokens, and rows have {length}. Context parallelism splits"
                    " windows only for packed batches. Use HFCausalLM with packed batches, or shorter rows."
                )
            self._drop_padding(name, given)
        given["use_cache"] = False
        return True

    def _drop_padding(self, name: str, given: dict[str, Any]) -> None:
        """Leave out a mask of tokens at the end of rows, which no other token sees."""
        mask = given.pop("attention_mask", None)
        if mask is None or (mask.dim() == 2 and bool((mask[:, 1:] <= mask[:, :-1]).all())):
            return
        raise ValueError(
            f"{name} is given an attention_mask under context parallelism that is more than padding at the end of"
            " rows. Pad at the end (padding_side='right'), or leave the mask out."
        )


def find(model: nn.Module, wanted: str | None) -> tuple[str, nn.Module, Kind]:
    """Return the name, the module and the kind of what runs on parts of the sequence.

    Args:
        model: The whole model.
        wanted: The name that the user has given, or None: the first GPT of this package or model of transformers.

    Raises:
        ValueError: If ``model`` has none, or it cannot be split.
    """
    modules = dict(model.named_modules())
    if wanted is not None:
        if wanted not in modules or not wanted:
            raise ValueError(
                f"context_parallel_module={wanted!r} is no submodule of {type(model).__name__}."
                f" Its children are {', '.join(name for name, _ in model.named_children())}."
            )
        return _known(wanted, modules[wanted]) or (wanted, modules[wanted], Kind())
    for name, module in modules.items():
        if (found := _known(name, module)) is not None:
            return found
    raise ValueError(
        f"FSDP2Strategy(context_parallel_size) splits the sequence of a GPT of this package or of a decoder of"
        f" transformers, and {type(model).__name__} has neither. Give context_parallel_module the name of the module"
        " whose inputs and outputs are [batch, seq, ...], such as 'model'."
    )


def _known(name: str, module: nn.Module) -> tuple[str, nn.Module, Kind] | None:
    classes = {base.__name__ for base in type(module).__mro__}  # FSDP2 has classes of its own
    if "GPT" in classes and hasattr(module, "rope"):
        return name, module, OurGPT()
    if "PreTrainedModel" in classes:
        trunk: Any = getattr(module, module.base_model_prefix, module)  # type: ignore[arg-type, call-overload]
        below = next((inner for inner, each in module.named_modules() if each is trunk), "")
        kind, name = Transformers(), f"{name}.{below}".strip(".")
        kind.check(name, trunk)
        return name, trunk, kind
    return None


def _parameters(module: nn.Module) -> Any:
    return inspect.signature(type(module).forward).parameters


def positions_argument(module: nn.Module) -> str | None:
    """Return the name of the argument that takes the positions of tokens, or None."""
    return next((name for name in ("position_ids", "positions") if name in _parameters(module)), None)
