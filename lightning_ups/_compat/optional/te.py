"""The interface to Transformer Engine 2, including the few private names that are used.

Written against release 2.20.2.
"""

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import noop_context_fn

from lightning_ups._compat.optional.cudnn import cudnn_conflict, torchs_cudnn_first
from lightning_ups._compat.optional.packages import has, require
from lightning_ups._compat.torch.tensors.autograd import checkpoint_options, outside_modes

REQUIREMENT, EXTRA, FEATURE = "transformer-engine>=2.20", "te", "TEPrecision"
DEVICE = "cuda"
_STATE = ("scale", "amax_history")  # of delayed scaling; other recipes have none
_SIDES = ("scaling_fwd", "scaling_bwd")
# Initial scales of delayed scaling, before a maximum was seen. Transformer Engine uses 1 for all, which rounds most
# gradients, and weights of wide layers, to zero. Weights are rarely above 7 and gradients below 0.8, and clipping in
# the first step is corrected in the second.
_BEGIN = (1.0, 64.0, 1.0)  # the input, the weight, the output
_BEGIN_GRADIENTS = 65536.0


def engine() -> Any:
    """Return ``transformer_engine.pytorch``.

    Raises:
        ModuleNotFoundError: If it is missing.
        ImportError: If it cannot be loaded here.
    """
    return _required("transformer_engine.pytorch")


@cache  # each module asks in each forward; looking up what is installed takes about half a millisecond
def _required(module: str) -> Any:
    try:
        with _first_import():
            found = require(module, requirement=REQUIREMENT, extra=EXTRA, feature=FEATURE)
    except ImportError as error:
        if not isinstance(error.__cause__, OSError):  # raised if a library is missing or does not match
            raise
        raise ImportError(
            f"{FEATURE} found Transformer Engine but could not load its libraries: {str(error.__cause__).rstrip('.')}."
            " Its libraries are compiled against torch and CUDA."
            " Install it in an environment with both:"
            " pip install --no-build-isolation 'transformer-engine[pytorch]>=2.20'."
        ) from error.__cause__
    _check_cudnn()
    return found


@contextmanager
def _first_import() -> Iterator[None]:
    # It loads the first cuDNN that it finds on the machine, for the whole process, and warns torch users about JAX.
    if "transformer_engine" in sys.modules or not has("transformer_engine"):
        yield
        return
    with torchs_cudnn_first(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected a Jax installation", category=RuntimeWarning)
        yield


@cache
def _check_cudnn() -> None:
    if (conflict := cudnn_conflict()) is not None:
        raise ImportError(
            f"{FEATURE} found another cuDNN than torch's in this process, with which torch's attention and convolutions"
            f" fail: {conflict}. Do not import transformer_engine before the run, remove the other cuDNN from"
            " CUDNN_HOME, CUDNN_PATH and LD_LIBRARY_PATH, and start a new process."
        )


def make_recipe(engine_class: str, *, number_format: str | None, **options: Any) -> Any:
    """Return Transformer Engine's recipe of this class."""
    recipes = _required("transformer_engine.common.recipe")
    if number_format is not None:
        options["fp8_format"] = getattr(recipes.Format, number_format.upper())
    return getattr(recipes, engine_class)(**options)


def why_not(check: str, device: torch.device) -> str | None:
    """Return why ``device`` fails the availability check of this name, or None."""
    te = engine()
    if (why := why_not_on(device.type)) is not None:
        return why
    available, reason = getattr(te, check)(return_reason=True)
    return None if available else reason.rstrip(".")


def why_not_on(kind: str) -> str | None:
    """Return why Transformer Engine cannot run on this kind of device, or None. It need not be installed."""
    return None if kind == DEVICE else f"it runs on {DEVICE} devices alone"


def autocast(recipe: Any, *, group: Any) -> AbstractContextManager[Any]:
    """Return a context in which Transformer Engine's modules use ``recipe``."""
    return engine().autocast(enabled=True, recipe=recipe, amax_reduction_group=group)


def is_quantizing() -> bool:
    """Return whether such a context is active."""
    return bool(_manager().is_fp8_enabled())


def out_of_sight() -> AbstractContextManager[Any]:
    """Return a context that hides operations from dispatch modes, as Transformer Engine's own kernels are hidden.

    A selective checkpoint compares the operators of both forwards, and the second copies scales that the first did not.
    """
    return outside_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()


def checkpoint_by(recipe: Any) -> Callable[..., Any]:
    """Return Transformer Engine's checkpoint, called like torch's: the second forward uses the scales of the first.

    The second forward opens its own autocast, whose end would reduce the maxima of all modules again, for each
    recomputed block. Inside another autocast it does not.
    """
    te = engine()

    def checkpoint(function: Callable[..., Any], *args: Any, context_fn: Any = noop_context_fn, **options: Any) -> Any:
        def contexts() -> tuple[Any, Any]:
            first, second = context_fn()
            if isinstance(first, TorchDispatchMode):  # a selective checkpoint's; torch's own checkpoint sets this on it
                vars(first).update(checkpoint_options())
            return first, _Together(lambda: te.autocast(enabled=False, recipe=recipe), lambda: second)

        return te.checkpoint(function, *args, context_fn=contexts, **options)

    return checkpoint


class _Together:
    """Combines several contexts into one."""

    def __init__(self, *makers: Callable[[], AbstractContextManager[Any]]) -> None:
        self._makers, self._stack = makers, ExitStack()

    def __enter__(self) -> None:
        for maker in self._makers:
            self._stack.enter_context(maker())

    def __exit__(self, *error: Any) -> None:
        self._stack.close()


def mark_fsdp2(module: nn.Module) -> None:
    """Mark that FSDP2 gathers the weights of ``module``, so that it keeps no copies for backward.

    It would look for itself in the tree of a sharded module, but a module with borrowed weights is in none.
    """
    if hasattr(module, "fast_setattr") and hasattr(type(module), "is_fsdp2"):
        module.__dict__["_is_fsdp2"] = True


def scales(module: nn.Module) -> dict[str, Tensor]:
    """Return a copy, on the CPU, of the scales and maxima of ``module``; empty if it has none."""
    meta = getattr(module, "fp8_meta", {})
    return {
        f"{side}.{name}": getattr(meta[side], name).detach().cpu().clone()
        for side in _SIDES
        for name in _STATE
        if side in meta and isinstance(getattr(meta[side], name, None), Tensor)
    }


def set_scales(module: nn.Module, state: Mapping[str, Tensor], *, recipe: Any, num_products: int) -> None:
    """Restore scales and maxima of ``module``; if the history length differs, the common part."""
    given: Any = module
    given.fp8_meta |= {"num_gemms": num_products, "recipe": recipe}
    # A module reads the active recipe. What is created in evaluation mode could not be changed in training.
    with torch.inference_mode(mode=False), engine().autocast(enabled=False, recipe=recipe):
        given.init_fp8_meta_tensors(recipe)
    for key, value in state.items():
        side, name = key.split(".")
        mine = getattr(given.fp8_meta[side], name)
        rows = min(len(mine), len(value))
        mine[:rows].copy_(value[:rows])


def begin_scales(module: nn.Module, *, recipe: Any, num_products: int) -> None:
    """Initialize missing scales of delayed scaling in ``module`` so that no gradients are lost."""
    if scales(module):
        return
    set_scales(module, {}, recipe=recipe, num_products=num_products)
    meta: Any = module.fp8_meta
    meta["scaling_fwd"].scale.copy_(torch.tensor(_BEGIN * num_products))
    meta["scaling_bwd"].scale.fill_(_BEGIN_GRADIENTS)


def forget_scales() -> None:
    """Drop the modules whose maxima Transformer Engine reduces: it would keep and reduce them forever."""
    _manager().reset()


def holds_engine_modules(module: nn.Module) -> list[str]:
    """Return the names of Transformer Engine modules in ``module``, without importing it."""
    return [
        name
        for name, m in module.named_modules()
        if any(base.__module__.partition(".")[0] == "transformer_engine" for base in type(m).__mro__)
    ]


def _manager() -> Any:
    return _required("transformer_engine.pytorch.quantization").FP8GlobalStateManager
