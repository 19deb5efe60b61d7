"""Times a linear layer on the device: compiled, with casts, as in a model."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import count
from statistics import median
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_ups.insight.advise.linear_shapes import Product
from lightning_ups.insight.advise.te_products import Modules, engine_context, engine_forward, is_engine
from lightning_ups.insight.advise.timing_table import BFLOAT16, Timer, Times
from lightning_ups.transforms.float8 import compiler_settings, float8_swap

_NUMBER = count()
_REPEATS = 10  # in one CUDA graph
_RUN_MS = 40.0
ROUNDS = 9  # of all three measurements: over a second, since clocks under load are lower than in a burst
MOST_ROUNDS = 4 * ROUNDS  # if the times vary
STEADY = 0.05  # how much slower the median may be than a fast run


Clock = Callable[[Callable[[], Any]], Callable[[], float]]


def timer_on(device: torch.device, *, clock: Clock | None = None, backend: str = "inductor") -> Timer:
    """Return a function that times a product on ``device``.

    An elementwise product precedes the linear layer, since in a model a norm or an activation does, with which casts
    are fused. The work is replayed as a CUDA graph, since in a model the host is far ahead. Transformer Engine's
    modules are launched each time, since they are not compiled.

    The parts of a product are differences of measurements, which alternate, so that changes of the clock affect all.
    The lower quartile counts, since other load makes runs only longer. If runs vary, there are more of them, and the
    times are marked as doubtful.

    Args:
        device: A GPU.
        clock: Prepares a call, and returns a function that measures its milliseconds. None: on the GPU.
        backend: Compiles the layer.
    """

    def timer(product: Product, recipe: str) -> Times:
        engine = engine_context(recipe) if is_engine(recipe) else nullcontext()
        default = _launched if is_engine(recipe) else _Recorded()
        with compiler_settings(recipe), engine, torch.random.fork_rng([device] if device.type == "cuda" else []):
            return _times(product, recipe, device, clock or default, backend)

    return timer


def _times(product: Product, recipe: str, device: torch.device, clock: Clock, backend: str) -> Times:
    x = torch.randn(product.rows, product.in_features, device=device, dtype=torch.bfloat16, requires_grad=True)
    modules = Modules(product, device=device)
    both, input_alone, weights = _forwards(product, recipe, modules, backend)
    gradients = [torch.randn_like(part) for part in _parts(both(x))]

    def forward_and_gradients() -> Any:
        return torch.autograd.grad(_parts(both(x)), (x, *weights), gradients)

    def forward_and_dgrad() -> Any:
        return torch.autograd.grad(_parts(input_alone(x)), (x,), gradients)

    everything = [*modules.parameters(), *weights]
    total, forward = clock(forward_and_gradients), clock(lambda: both(x))
    with _frozen(everything):
        without_wgrad = clock(forward_and_dgrad)

    def frozen() -> float:
        with _frozen(everything):
            return without_wgrad()

    return _in_parts(_by_turns(total, forward, frozen))


@contextmanager
def _frozen(weights: Iterable[nn.Parameter]) -> Iterator[None]:
    changed = [weight for weight in dict.fromkeys(weights) if weight.requires_grad]
    for weight in changed:
        weight.requires_grad = False
    try:
        yield
    finally:
        for weight in changed:
            weight.requires_grad = True


def _by_turns(*clocks: Callable[[], float]) -> list[list[float]]:
    """Return the times of several alternating measurements."""
    runs: list[list[float]] = [[] for _ in clocks]
    while not runs[0] or (len(runs[0]) < MOST_ROUNDS and _spread(runs) > STEADY):
        for _ in range(ROUNDS):
            for times, clock in zip(runs, clocks, strict=True):
                times.append(clock())
    return runs


def _quick(times: Sequence[float]) -> float:
    return sorted(times)[(len(times) - 1) // 4]


def _spread(runs: Iterable[Sequence[float]]) -> float:
    return max(median(times) / max(_quick(times), 1e-9) - 1 for times in runs)


def _in_parts(runs: Sequence[Sequence[float]]) -> Times:
    total, forward, without_wgrad = (_quick(times) for times in runs)
    spread, in_order = _spread(runs), forward < without_wgrad < total
    doubt = "" if in_order else "the time of a product was as long as that of its parts"
    if spread > STEADY:
        doubt = f"runs of the same product differed by {spread:.0%}"
    forward = min(forward, total)
    without_wgrad = min(max(without_wgrad, forward), total)
    return Times(forward_ms=forward, dgrad_ms=without_wgrad - forward, wgrad_ms=total - without_wgrad, doubt=doubt)


Forward = Callable[[Tensor], Any]


def _forwards(
    product: Product, recipe: str, modules: Modules, backend: str
) -> tuple[Forward, Forward, list[nn.Parameter]]:
    """Return the forward compiled twice, for weights with and without gradients, and the weights."""
    if is_engine(recipe):
        forward = engine_forward(modules)
        return forward, forward, [*modules.parameters()]
    if not product.is_plain:
        return _compiled(modules, backend), _compiled(modules, backend), [*modules.parameters()]
    linear = modules.first[0]
    layer = linear if recipe == BFLOAT16 else float8_swap(recipe)(cast("nn.Linear", linear))
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

    # Dynamo limits the number of graphs by code object.
    code = product.__code__.replace(co_name=f"product_{next(_NUMBER)}")
    own = FunctionType(code, product.__globals__, code.co_name, None, product.__closure__)
    return torch.compile(own, dynamic=False, fullgraph=True, backend=backend)


class _Recorded:
    """Measures the device time of calls, by CUDA graphs."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None  # shared by all graphs, whose results are not read

    def __call__(self, call: Callable[[], Any]) -> Callable[[], float]:
        stream = self._stream = self._stream or torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream):
            for _ in range(_REPEATS):
                call()
        self._pool = self._pool or graph.pool()
        once = _replayed(graph, 2)
        replays = max(2, round(_RUN_MS / max(once * _REPEATS, 1e-3)))
        return lambda: _replayed(graph, replays)


def _launched(call: Callable[[], Any]) -> Callable[[], float]:
    """Measure the time of a call that is launched each time."""
    for _ in range(3):
        call()
    once = _between(call, 2)
    repeats = max(2, round(_RUN_MS / max(once, 1e-3)))
    return lambda: _between(call, repeats)


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
