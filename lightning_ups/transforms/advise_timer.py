"""Timing a linear layer on the device: compiled, with the casts, as it runs within a model."""

from collections.abc import Callable
from contextlib import nullcontext
from itertools import count
from statistics import median
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_ups._compat.inductor import eager_precision_casts
from lightning_ups.transforms.advise_engine import Modules, engine_context, engine_forward, is_engine
from lightning_ups.transforms.advise_shapes import Product
from lightning_ups.transforms.advise_table import BFLOAT16, Timer, Times
from lightning_ups.transforms.float8 import Recipe, float8_swap

__all__ = ["Measure", "timer_on"]

_NUMBER = count()
_REPEATS = 10  # in one recording
_AT_LEAST_MS = 120.0  # of each of the runs whose median counts: clocks under load are lower than those of a burst


Measure = Callable[[Callable[[], Any]], float]


def timer_on(device: torch.device, *, measure: Measure | None = None, backend: str = "inductor") -> Timer:
    """Return what times a product on ``device``.

    What precedes a linear layer in a model is mostly a norm or an activation, with which a cast can be fused; so
    a multiplication by a vector precedes it here, in bfloat16 too. The work is recorded as a CUDA graph, since in
    a model the host is far ahead. Transformer Engine's modules are launched each time, as they are in a model: they are
    no part of compiled code.

    Args:
        device: A GPU.
        measure: Returns the milliseconds that a call takes. None: on the GPU.
        backend: Compiles the layer.
    """

    def timer(product: Product, recipe: str) -> Times:
        rounding = eager_precision_casts() if recipe.startswith("rowwise") else nullcontext()
        engine = engine_context(recipe) if is_engine(recipe) else nullcontext()
        default = _launched if is_engine(recipe) else _on_gpu
        with rounding, engine, torch.random.fork_rng([device] if device.type == "cuda" else []):
            return _times(product, recipe, device, measure or default, backend)

    return timer


def _times(product: Product, recipe: str, device: torch.device, measure: Measure, backend: str) -> Times:
    x = torch.randn(product.rows, product.in_features, device=device, dtype=torch.bfloat16, requires_grad=True)
    modules = Modules(product, device=device)
    both, input_alone, weights = _forwards(product, recipe, modules, backend)
    gradients = [torch.randn_like(part) for part in _parts(both(x))]

    def forward_and_gradients() -> Any:
        return torch.autograd.grad(_parts(both(x)), (x, *weights), gradients)

    def forward_and_dgrad() -> Any:
        return torch.autograd.grad(_parts(input_alone(x)), (x,), gradients)

    whole, forward = measure(forward_and_gradients), measure(lambda: both(x))
    for weight in modules.parameters():
        weight.requires_grad = False
    for weight in weights:
        weight.requires_grad = False
    without_wgrad = measure(forward_and_dgrad)
    without_wgrad = min(max(without_wgrad, forward), whole)
    return Times(forward_ms=forward, dgrad_ms=without_wgrad - forward, wgrad_ms=whole - without_wgrad)


Forward = Callable[[Tensor], Any]


def _forwards(
    product: Product, recipe: str, modules: Modules, backend: str
) -> tuple[Forward, Forward, list[nn.Parameter]]:
    """Return the forward twice, as a compiled one is of weights with gradients or of such without, and the weights."""
    if is_engine(recipe):
        forward = engine_forward(modules)
        return forward, forward, [*modules.parameters()]
    if not product.is_plain:
        return _compiled(modules, backend), _compiled(modules, backend), [*modules.parameters()]
    linear = modules.first[0]
    layer = linear if recipe == BFLOAT16 else float8_swap(cast("Recipe", recipe))(cast("nn.Linear", linear))
    return (
        _compiled(modules.behind(layer), backend),
        _compiled(modules.behind(layer), backend),
        [cast("nn.Parameter", layer.weight)],
    )


def _parts(found: Any) -> tuple[Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


def _compiled(forward: Forward, backend: str) -> Forward:
    def product(x: Tensor) -> Any:
        return forward(x)

    # Dynamo keeps its graphs, and a limit of eight, by code object.
    code = product.__code__.replace(co_name=f"product_{next(_NUMBER)}")
    own = FunctionType(code, product.__globals__, code.co_name, None, product.__closure__)
    return torch.compile(own, dynamic=False, fullgraph=True, backend=backend)


def _on_gpu(call: Callable[[], Any]) -> float:
    """Return the milliseconds of one call on the device, the host left out."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(_REPEATS):
            call()
    once = _replayed(graph, 2)
    replays = max(2, round(_AT_LEAST_MS / max(once * _REPEATS, 1e-3)))
    return median(_replayed(graph, replays) for _ in range(3))


def _launched(call: Callable[[], Any]) -> float:
    """Return the milliseconds of one call, launched anew each time, as what no compiler sees is in a model too."""
    for _ in range(3):
        call()
    once = _between(call, 2)
    repeats = max(2, round(_AT_LEAST_MS / max(once, 1e-3)))
    return median(_between(call, repeats) for _ in range(3))


def _replayed(graph: "torch.cuda.CUDAGraph", times: int) -> float:
    return _between(graph.replay, times) / _REPEATS


def _between(call: Callable[[], Any], times: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / times
