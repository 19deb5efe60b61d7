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
    a model the host is far ahead.

    Args:
        device: A GPU.
        measure: Returns the milliseconds that a call takes. None: on the GPU.
        backend: Compiles the layer.
    """

    def timer(product: Product, recipe: str) -> Times:
        rounding = eager_precision_casts() if recipe.startswith("rowwise") else nullcontext()
        with rounding, torch.random.fork_rng([device] if device.type == "cuda" else []):
            return _times(product, recipe, device, measure or _on_gpu, backend)

    return timer


def _times(product: Product, recipe: str, device: torch.device, measure: Measure, backend: str) -> Times:
    x = torch.randn(product.rows, product.in_features, device=device, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn(product.rows, product.out_features, device=device, dtype=torch.bfloat16)
    norm = torch.ones(product.in_features, device=device, dtype=torch.bfloat16)
    linear = nn.Linear(product.in_features, product.out_features, bias=False, device=device, dtype=torch.bfloat16)
    layer = linear if recipe == BFLOAT16 else float8_swap(cast("Recipe", recipe))(linear)
    both, input_alone = _compiled(layer, norm, backend), _compiled(layer, norm, backend)
    weight = cast("nn.Parameter", layer.weight)

    def forward_and_gradients() -> Any:
        return torch.autograd.grad(both(x), (x, weight), gradient)

    def forward_and_dgrad() -> Any:
        return torch.autograd.grad(input_alone(x), (x,), gradient)

    whole, forward = measure(forward_and_gradients), measure(lambda: both(x))
    weight.requires_grad = False
    without_wgrad = measure(forward_and_dgrad)
    without_wgrad = min(max(without_wgrad, forward), whole)
    return Times(forward_ms=forward, dgrad_ms=without_wgrad - forward, wgrad_ms=whole - without_wgrad)


def _compiled(layer: nn.Module, norm: Tensor, backend: str) -> Callable[[Tensor], Tensor]:
    def product(x: Tensor) -> Tensor:
        return layer(x * norm)

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


def _replayed(graph: "torch.cuda.CUDAGraph", times: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / times / _REPEATS
