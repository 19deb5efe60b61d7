"""What one training step costs, counted on a twin of the module that has no data.

The twin has the module's classes and twins of its attributes, meta tensors in place of all tensors, and none of its
hooks. To run its ``training_step`` computes nothing, draws no random number on a device, and touches no gradient,
buffer, metric, counter, generator or container of the run. Sharded, compiled and converted modules have a plain twin.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_ups._compat.torch.distributions import without_checks
from lightning_ups._compat.torch.flop_counter import run_backward
from lightning_ups._compat.torch.tensors.autograd import in_backward
from lightning_ups.insight.throughput.flops import count_flops
from lightning_ups.insight.throughput.known_values import KnownValues
from lightning_ups.insight.throughput.twins import Twins
from lightning_ups.insight.throughput.untouched import NotCopiedError, Untouched

__all__ = ["StepFlops", "step_flops"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFlops:
    """Floating-point operations of one forward and backward.

    Args:
        model: What the model needs.
        hardware: With what is recomputed in backward.
        low_precision: The part of ``model`` that layers converted to fp8 compute.
    """

    model: int
    hardware: int
    low_precision: int = 0


def step_flops(
    module: nn.Module,
    batch: Any,
    *,
    step: Callable[[Any, Any], Any],
    attributes: Mapping[str, Any] | None = None,
    instead: Iterable[tuple[Any, Callable[[Any], Any]]] = (),
) -> StepFlops:
    """Count ``step(twin, batch)``, which returns a loss, a mapping with one, or None, and the backward of that loss.

    Args:
        module: Left as it is.
        batch: Shapes and types matter, and the values of small tensors of integers, such as lengths and masks.
        step: Calls the twin's training step.
        attributes: What the twin has in place of the module's own, such as a ``log`` that does nothing.
        instead: Objects that the module holds and what makes a stand-in of each, given a function that makes twins.

    Raises:
        NotCopiedError: If the step uses something of which it cannot have a copy.
        Exception: Whatever the step raises on tensors without data.
    """
    given = step, attributes or {}, [*instead]
    try:
        return _step_flops(module, batch, *given, knows=True)
    except NotCopiedError:
        raise
    except Exception:  # noqa: BLE001  (a branch that its values lead to may be one that needs others)
        return _step_flops(module, batch, *given, knows=False)


def _step_flops(
    module: nn.Module,
    batch: Any,
    step: Callable[[Any, Any], Any],
    attributes: Mapping[str, Any],
    instead: Iterable[tuple[Any, Callable[[Any], Any]]],
    *,
    knows: bool,
) -> StepFlops:
    twins = _Twins(instead)
    try:
        twin, found = twins.value(module, "self"), twins.value(batch, "the batch")
        if isinstance(twin, Untouched):
            twin()
        for name, value in attributes.items():
            object.__setattr__(twin, name, value)
        with twins.watch.on(), _without_data(twins.known if knows else KnownValues()):
            counted = count_flops(lambda: _run(step, twin, found))
    finally:
        twins.close()
    low = sum(layer.operations for layer in twins.low_precision)
    return StepFlops(model=counted.total - counted.recomputed, hardware=counted.total, low_precision=low)


def _run(step: Callable[[Any, Any], Any], twin: Any, batch: Any) -> None:
    result = step(twin, batch)
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if isinstance(loss, Tensor) and loss.requires_grad:
        run_backward(loss)  # attention that is recomputed is counted as it was in forward


@contextmanager
def _without_data(known: KnownValues) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # what would be said is said when the step runs
        stack.enter_context(_no_tensor_of_what_is_held())
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(torch.enable_grad())
        for device in ("cpu", "cuda"):  # casts follow the device, and meta has none of its own
            stack.enter_context(torch.autocast(device, enabled=False))
        stack.enter_context(torch.device("meta"))  # for what the step makes itself
        stack.enter_context(_Answers(known))
        stack.enter_context(without_checks())
        yield


@contextmanager
def _no_tensor_of_what_is_held() -> Iterator[None]:
    """Let ``from_numpy`` refuse an array of the run, which it would make a tensor that can be written."""
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    warnings.filterwarnings("error", message="The given (NumPy array|buffer) is not writable")
    try:
        yield
    finally:
        torch.set_warn_always(always)


class _Twins(Twins):
    """Twins of modules without hooks, and of tensors without data."""

    def __init__(self, instead: Iterable[tuple[Any, Callable[[Any], Any]]] = ()) -> None:
        super().__init__(instead)
        self.low_precision: list[_LowPrecisionLinear] = []
        self.known = KnownValues()

    @override
    def close(self) -> None:
        super().close()
        self.known.clear()

    @override
    def module(self, module: nn.Module) -> Any:
        if isinstance(inner := vars(module).get("_modules", {}).get("_orig_mod"), nn.Module):
            return self.value(inner)  # what torch.compile(module) returned
        if _is_metric(module):
            return _Silent()
        if _is_low_precision(module):
            self.low_precision.append(layer := _LowPrecisionLinear(self, module))
            return layer
        if hasattr(type(module), "__del__"):
            return self._untouched(module, "whose end would be that of what it has")
        twin = self._keep(module, _bare(module))
        self._fill(module, twin)
        return twin

    def _fill(self, module: nn.Module, twin: nn.Module) -> None:
        own = vars(twin)
        for name, value in vars(module).items():
            if name.endswith("_hooks") or name.endswith(("_hooks_with_kwargs", "_hooks_always_called")):
                own[name] = type(value)()  # they belong to the run: sharding, capturing, counting
            elif name in ("_parameters", "_buffers", "_modules"):
                own[name] = {key: self.value(inner, f".{key}") for key, inner in value.items()}
            elif name == "forward":
                if (forward := _forward_of(value, module, twin)) is not None:
                    own["forward"] = forward
            elif name != "_compiled_call_impl":
                own[name] = self.value(value, f".{name}")

    @override
    def tensor(self, tensor: Tensor) -> Tensor:
        # In one type: what casts between types is left out with the hooks, and costs no operations that count.
        dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
        twin = torch.empty(tensor.shape, dtype=dtype, device="meta")
        if isinstance(tensor, nn.Parameter):
            twin = nn.Parameter(twin, requires_grad=tensor.requires_grad)
        self.known.add(twin, tensor)
        return twin


def _bare(module: nn.Module) -> nn.Module:
    kind = type(module)
    if isinstance(module, FSDPModule):
        kind = next(k for k in kind.__mro__ if not issubclass(k, FSDPModule))
    return object.__new__(kind)


def _forward_of(value: Any, module: nn.Module, twin: nn.Module) -> Any:
    # Of replaced forwards only recomputation is of interest: it is work. Compilation and casts are left out.
    while value is not None:
        function = getattr(value, "__func__", None)
        if function is not None and function.__module__ == "lightning_ups.transforms.recompute.wrapping":
            return MethodType(function, twin)
        if isinstance(value, MethodType):
            return MethodType(value.__func__, twin) if value.__self__ is module else None
        value = getattr(value, "__wrapped__", None)
    return None


class _LowPrecisionLinear(nn.Module):
    """Stands for a linear layer that computes in fp8, and counts what it computes by itself."""

    def __init__(self, twins: _Twins, layer: nn.Module) -> None:
        super().__init__()
        self.weight = twins.value(layer.weight, ".weight")
        self.bias = twins.value(layer.bias, ".bias")
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.operations = 0

    @override
    def forward(self, x: Tensor) -> Tensor:
        forward = 2 * x.numel() * self.weight.shape[0]
        backwards = (x.requires_grad + self.weight.requires_grad) if torch.is_grad_enabled() else 0
        if not in_backward():  # not what is recomputed
            self.operations += forward * (1 + backwards)
        return nn.functional.linear(x, self.weight, self.bias)


def _is_low_precision(module: nn.Module) -> bool:
    return any(base.__name__ == "Float8Linear" for base in type(module).__mro__)


class _Silent(nn.Module):
    """Stands for a metric, which costs next to nothing and often needs values."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self.forward

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return torch.zeros((), device="meta")


def _is_metric(module: nn.Module) -> bool:
    return any(base.__module__.partition(".")[0] == "torchmetrics" for base in type(module).__mro__)


class _Answers(TorchFunctionMode):
    """Answers a question for the value of a tensor that has none: with what is known, or as logs and checks need it.

    What cannot be run on such tensors, and costs what something else does, is run as that.
    """

    def __init__(self, known: KnownValues) -> None:
        super().__init__()
        self._known = known

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in _ASKED and args and isinstance(args[0], Tensor) and (value := self._known[args[0]]) is not None:
            return func(value, *args[1:], **kwargs)
        if name in _ANSWERS and args and isinstance(args[0], Tensor) and args[0].device.type == "meta":
            return _ANSWERS[name](args[0])
        if name in _GROUPED and len(args) > 1 and args[0].dim() == 2 and args[1].dim() == 3:
            return args[0] @ args[1][0]  # each row meets one of the matrices, all of one shape: as many operations
        known = self._known.can_follow(func, args, kwargs)
        drawn = {"generator": None} if isinstance(kwargs.get("generator"), torch.Generator) else {}  # meta has none
        result = func(*args, **kwargs | drawn)
        self._known.forget(func)
        if known:
            self._known.follow(func, args, kwargs, result)
        return result


_ASKED = ("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "__format__")
_GROUPED = ("grouped_mm", "_grouped_mm")  # of experts: torch knows no count for it, and has it in bfloat16 alone
_ANSWERS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda tensor: 1.0 if tensor.is_floating_point() else tensor.dtype is not torch.bool and 1,
    "__bool__": lambda _: False,
    "__float__": lambda _: 1.0,
    "__int__": lambda _: 1,
    "__index__": lambda _: 1,
    "__format__": lambda _: "1",
    "cpu": lambda tensor: tensor,
    "cuda": lambda tensor: tensor,
}
