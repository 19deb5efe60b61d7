"""Prepares models of Hugging Face's transformers for Dynamo, and reads their weights one by one."""

import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ups._compat.optional.packages import require
from lightning_ups._compat.patches import applied
from lightning_ups._compat.torch.fsdp.recording import open_recordings
from lightning_ups._compat.torch.tensors.custom_ops import define_operator

_OUTPUTS, _INSTALL = "transformers.utils.output_capturing", "maybe_install_capturing_hooks"
_MASKS = "transformers.masking_utils"
_LOSSES = "transformers.loss.loss_utils"
_ONE_THREAD = "HF_DEACTIVATE_ASYNC_LOAD"
_INSTALLED = "_output_capturing_hooks_installed"


def imported() -> Any:
    """Return the package, in a version with the interfaces that `HFCausalLM` uses.

    Raises:
        ModuleNotFoundError: If it is missing or older.
    """
    return require("transformers", requirement="transformers>=5", extra="hf", feature="HFCausalLM")


@contextmanager
def ready_for_one_graph(module: nn.Module) -> Iterator[None]:
    """Let Dynamo trace the models of transformers below ``module`` in one graph, while the context is open.

    A model that returns outputs of its layers, such as router logits, installs hooks for them in its first forward,
    under a lock. They are installed now, and do nothing unless outputs are requested. The feature encoder of a speech
    model makes its input require a gradient, which only its own gradient checkpointing needs. A model whose class names
    no loss, such as GPT-2's, warns as it takes the default one, which ends a graph: it is given that loss.
    """
    outputs: Any = sys.modules.get(_OUTPUTS)
    kind: Any = _model_class() if hasattr(outputs, _INSTALL) else ()
    models: list[Any] = [
        child for child in module.modules() if isinstance(child, kind) and not vars(child).get(_INSTALLED)
    ]
    encoders: list[Any] = [
        child
        for child in module.modules()
        if type(child).__module__.startswith("transformers.")
        and vars(child).get("_requires_grad") is True
        and not vars(child).get("gradient_checkpointing")
    ]
    known: Any = getattr(sys.modules.get(_LOSSES), "LOSS_MAPPING", None)
    without_loss: list[Any] = [
        model
        for model in models
        if known
        and type(model).loss_function is kind.loss_function
        and not hasattr(model, "_loss_function")
        and getattr(model, "loss_type", None) not in known
    ]
    before = {child: {*child._forward_hooks} for model in models for child in model.modules()}
    try:
        for model in models:
            if _opens_a_collector(model):
                outputs.maybe_install_capturing_hooks(model)
        for encoder in encoders:
            encoder._requires_grad = False
        for model in without_loss:
            model._loss_function = known["ForCausalLM"]
        yield
    finally:
        for model in without_loss:
            if vars(model).get("_loss_function") is known["ForCausalLM"]:
                del model._loss_function
        for encoder in encoders:
            encoder._requires_grad = True
        # A model with these hooks cannot be pickled.
        for child, kept in before.items():
            for number, hook in [*child._forward_hooks.items()]:
                if number not in kept and is_output_hook(hook):
                    del child._forward_hooks[number]
        for model in models:
            setattr(model, _INSTALLED, False)


def _opens_a_collector(model: nn.Module) -> bool:
    """Return whether the forward of ``model`` opens the collector of outputs. Dynamo cannot trace a hook without it."""
    forward: Any = type(model).forward
    while forward is not None and getattr(forward, "__globals__", {}).get("__name__") != _OUTPUTS:
        forward = getattr(forward, "__wrapped__", None)
    return forward is not None


def _model_class() -> Any:
    """Return the class of all models, or no class if none can exist. Asking transformers for it imports torchao."""
    return getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", ())


def is_output_hook(hook: object) -> bool:
    """Return whether ``hook`` only collects outputs of a layer for transformers."""
    return getattr(hook, "__module__", None) == _OUTPUTS


class _Traced:
    """What Dynamo traces: whether the innermost model of transformers makes its positions itself."""

    def __init__(self) -> None:
        self.makes_positions = False  # of the instance from the first, since Dynamo has a guard on where it is


TRACED = _Traced()


def masks_depend_on_positions(module: nn.Module) -> list[nn.Module]:
    """Return the models of transformers within ``module`` that take positions."""
    masks: Any = sys.modules.get(_MASKS)
    if not hasattr(masks, "find_packed_sequence_indices"):
        return []
    kind = _model_class()
    return [
        child
        for child in module.modules()
        if isinstance(child, kind) and "position_ids" in inspect.signature(type(child).forward).parameters
    ]


@contextmanager
def skipping_masks() -> Iterator[None]:
    """Let code that is compiled in this context pass no mask for positions that `TRACED` knows, nor for export's sake.

    Before torch 2.14, Dynamo answers each question for an export with yes.
    """

    def not_packed(stock: Callable[..., Any]) -> Callable[..., Any]:
        def find(position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() and TRACED.makes_positions:
                return None
            return stock(position_ids, *args, **kwargs)

        return find

    def not_exported(stock: Callable[..., Any]) -> Callable[..., Any]:
        return lambda: not torch.compiler.is_compiling() and stock()

    with (
        applied(f"{_MASKS}:find_packed_sequence_indices", not_packed, once=True),
        applied(f"{_MASKS}:is_torchdynamo_exporting", not_exported, once=True),
    ):
        yield


def read_on_meta(load: Callable[..., Any], path: str, **options: Any) -> Any:
    """Return what ``load``, a ``from_pretrained``, returns, with its weights on the meta device.

    They are results of an operator that reads a file. A `Recording` sees it, and what is done to its results, and
    repeats both later, tensor by tensor.
    """
    marks = [(record, len(record.operations)) for record in open_recordings()]
    before = os.environ.get(_ONE_THREAD, "0")
    os.environ[_ONE_THREAD] = "1"  # what other threads do is not recorded
    try:
        with applied("transformers.modeling_utils:safe_open", _opened_on_meta):
            model = load(path, **options, device_map={"": "meta"}, use_safetensors=True)
    finally:
        os.environ[_ONE_THREAD] = before
    for record, mark in marks:
        record.drop_unused(model, since=mark)  # random values that those of the file have replaced
    return model


def _opened_on_meta(stock: Callable[..., Any]) -> Callable[..., Any]:
    class OnMeta:
        """An open file, whose tensors are on the meta device."""

        def __init__(self, file: Any, **options: Any) -> None:
            self._name, self._file = str(file), stock(file, **options)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

        def __enter__(self) -> "OnMeta":
            self._file.__enter__()
            return self

        def __exit__(self, *error: object) -> None:
            self._file.__exit__(*error)

        def get_slice(self, name: str) -> Tensor:
            part = self._file.get_slice(name)
            shape = part.get_shape()
            with torch.device("cpu"):
                few = part[:0] if shape else self._file.get_tensor(name)
            return _from_file(torch.empty(0, dtype=few.dtype, device="meta"), self._name, name, shape)

    return OnMeta


def _from_safetensors(like: Tensor, file: str, name: str, shape: list[int]) -> Tensor:  # noqa: ARG001
    package: Any = require("safetensors", requirement="safetensors>=0.4.3", extra="hf", feature="HFCausalLM")
    with package.safe_open(file, "pt") as opened:
        return opened.get_tensor(name).to(like.device)


def _of_shape(like: Tensor, file: str, name: str, shape: list[int]) -> Tensor:  # noqa: ARG001
    return like.new_empty(shape)


_from_file = define_operator(_from_safetensors, name="from_safetensors", fake=_of_shape)
