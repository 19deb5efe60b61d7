"""Whether a compiled module is faster than the same module uncompiled: by its size, and by measurement."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from statistics import median
from typing import Any

import torch
from torch import Tensor, fx, nn

from lightning_ups._compat.torch.compile import dynamo
from lightning_ups.transforms.compile.alike_hooks import has_hooks
from lightning_ups.transforms.compile.mode import Clock
from lightning_ups.transforms.compile.trial import State, copy_of, no_autocast
from lightning_ups.transforms.random_state import host_state, restore_host_state

ROUNDS, MOST_MS = 5, 2000.0
LEAST_LOSS = 0.02  # what two measurements of one thing may differ by
# Calling compiled code costs the host some hundred microseconds for guards, the forward and the backward, and replaying
# a CUDA graph no less: about what launching so many operators costs. Above so many elements, which a GPU reads and
# writes in some tens of microseconds, fusing them may gain more than that.
MOST_CALLS, MOST_ELEMENTS = 32, 2**22


@dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """How long a forward and a backward of a module take, and the bytes that the one keeps for the other.

    Args:
        compiled_ms: Compiled.
        eager_ms: Uncompiled.
        compiled_bytes: Compiled.
        eager_bytes: Uncompiled.
    """

    compiled_ms: float
    eager_ms: float
    compiled_bytes: int = 0
    eager_bytes: int = 0

    @property
    def is_loss(self) -> bool:
        """Whether the module is faster uncompiled."""
        return self.compiled_ms > (1 + LEAST_LOSS) * self.eager_ms

    def __str__(self) -> str:
        return f"a forward and a backward take {self.compiled_ms:.3g} ms compiled and {self.eager_ms:.3g} ms uncompiled"


def gain_of(
    module: nn.Module,
    compiled: Callable[..., Any],
    eager: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    clock: Clock,
) -> Gain | None:
    """Return what compiling ``module`` gains in a call with these arguments, or None if that cannot be measured.

    Both ways run by turns, forward and backward, on copies of the arguments. Random numbers, buffers, attributes and
    gradients are left as they are.

    Args:
        module: The first argument of ``compiled`` and of ``eager``.
        compiled: The forward, compiled. The first round warms up, and compiles what this call needs.
        eager: The forward uncompiled.
        args: What the module is called with.
        kwargs: The same by name.
        clock: The times of the host and of the device.
    """
    # A timer around each graph would leave out guards and the code between graphs, which is where host-bound modules
    # lose.
    if any(map(has_hooks, module.modules())):
        return None  # which are the user's, and may count
    state, drawn, start = State(module), host_state(), dynamo.mark()
    try:
        with (
            torch.autograd.set_detect_anomaly(mode=False),
            torch.autograd.graph.saved_tensors_hooks(_AS_IT_IS, _AS_IT_IS),  # hides those around the module
        ):
            rounds: list[list[float]] = []
            kept: list[int] = []
            while len(rounds) <= ROUNDS and sum(map(sum, rounds[1:])) < MOST_MS:
                start = start if rounds[1:] else dynamo.mark()
                rounds.append([])
                kept.clear()
                for run in (compiled, eager):
                    try:
                        ms, size = _measure(module, run, args, kwargs, clock)
                    finally:
                        state.put_back()
                    rounds[-1].append(ms)
                    kept.append(size)
    except Exception:  # noqa: BLE001  (nothing that is only measured may end a run)
        return None
    finally:
        restore_host_state(drawn)
    if dynamo.compiled_since(start):
        return None
    compiled_ms, eager_ms = map(median, zip(*rounds[1:], strict=True))
    return Gain(compiled_ms=compiled_ms, eager_ms=eager_ms, compiled_bytes=kept[0], eager_bytes=kept[1])


def _measure(
    module: nn.Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], clock: Clock
) -> tuple[float, int]:
    """Return the milliseconds of a forward and a backward, and the bytes that are kept between the two."""
    if torch.is_autocast_cache_enabled():
        torch.clear_autocast_cache()  # it would hold casts whose backward has been
    copies: dict[int, Tensor] = {}
    storages: dict[int, torch.UntypedStorage] = {}

    def copied(tensor: Tensor) -> Tensor:
        if id(tensor) not in copies:  # what is passed twice stays one tensor
            copies[id(tensor)] = copy_of(tensor, written=False, storages=storages)
        return copies[id(tensor)]

    args, kwargs = dynamo.tree_map(copied, (args, dict(kwargs)))
    # Hooks of parameters are the user's, and run whenever their gradients are asked for.
    wanted = [t for t in (*module.parameters(), *copies.values()) if t.requires_grad and not t._backward_hooks]
    outputs: list[Tensor] = []
    clock.wait()
    before, start = clock.allocated(), clock.now()
    dynamo.tree_map(lambda t: outputs.append(t) or t, run(module, *args, **kwargs))
    kept, outputs = clock.allocated() - before, [output for output in outputs if output.requires_grad]
    with no_autocast({output.device.type for output in outputs}):
        torch.autograd.grad(outputs, wanted, [torch.zeros_like(output) for output in outputs], allow_unused=True)
    clock.wait()
    return clock.now() - start, kept


# Disabled, or Dynamo would compile it for the parts of a forward that are in no graph.
_AS_IT_IS: Any = torch.compiler.disable(lambda tensor: tensor)


def is_small(graph: fx.GraphModule) -> bool:
    """Return whether running the operators of ``graph`` one by one costs no more than calling compiled code."""
    calls = [node for node in graph.graph.nodes if node.op in ("call_function", "call_method", "call_module")]
    if len(calls) > MOST_CALLS or any(isinstance(part, fx.GraphModule) for part in graph.children()):
        return False  # a part that is a graph too is one of a checkpoint, say, or of attention that needs a compiler
    return sum(elements for node in calls for elements in _elements(node.meta.get("example_value"))) <= MOST_ELEMENTS


def _elements(value: object) -> Iterator[int]:
    if isinstance(value, Tensor):
        yield prod(size if isinstance(size, int) else MOST_ELEMENTS for size in value.shape)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _elements(item)
