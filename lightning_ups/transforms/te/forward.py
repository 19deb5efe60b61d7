"""Replaces a module's forward by that of a Transformer Engine module, and checks the inputs of fused ones.

The compiler does not trace it: each such module is a graph break.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from types import new_class
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from lightning_ups._compat.optional.te import is_quantizing
from lightning_ups._compat.torch.tensors.autograd import hidden_from_dynamo, in_backward
from lightning_ups.transforms.te.modules import Borrower

Compute = Callable[[nn.Module, Tensor], Any]
ROWS = 8  # Transformer Engine's float8 products require a multiple of this number of rows


class Calls:
    """Records which modules ran in one float8 region.

    Args:
        rows: The number of rows must be a multiple of this.
        once: Whether each module may run only once: delayed scaling keeps one maximum for each until the region ends.
    """

    def __init__(self, *, rows: int = ROWS, once: bool) -> None:
        self.rows, self._once = rows, once
        self.total = 0
        self._ran: set[int] = set()

    def begin(self) -> None:
        """Begin a region."""
        self._ran.clear()

    def note(self, of: str, borrower: Borrower, value: Tensor) -> None:
        """Record that the module of this name runs, and raise if the result would be wrong."""
        self.total += 1
        again, quantizing = in_backward(), is_quantizing()
        if again and borrower.was_quantizing and not quantizing:
            raise RuntimeError(
                f"{of} is recomputed in backward outside of Transformer Engine's autocast, which its forward was in."
                " The model calls torch.utils.checkpoint, which knows nothing of it."
                " Turn that off, such as gradient_checkpointing in transformers, and use ActivationCheckpoint()."
            )
        if not again:
            borrower.was_quantizing = quantizing
        if borrower.num_products == 0 or not quantizing:
            return
        rows = value.numel() // value.shape[-1]
        if rows % self.rows:
            raise ValueError(
                f"{of} got {tuple(value.shape)}: {rows} rows, which is no multiple of {self.rows}."
                f" Make batch times sequence a multiple of {self.rows}, or use DataLoader(drop_last=True)."
            )
        if not self._once or again:  # a recomputed block, with the maxima of its first forward
            return
        if id(borrower) in self._ran:
            raise RuntimeError(
                f"{of} ran twice in one training step with recipe='delayed', which keeps one maximum for each module."
                " Use recipe='current', which keeps none."
            )
        self._ran.add(id(borrower))


class PassedOn:
    """A norm that is fused with the layers that read it: its own forward returns its input."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._passed: ReferenceType[Tensor] | None = None

    def __call__(self, module: nn.Module, value: Tensor) -> Tensor:
        """Return ``value``, as another tensor that its reader recognizes."""
        passed = value.view_as(value)
        self._passed = ref(passed)
        return passed

    def check(self, of: str, value: Tensor) -> None:
        """Raise if ``value`` is not the output of the norm.

        Raises:
            RuntimeError: In that case.
        """
        passed, self._passed = self._passed, None
        if passed is not None and passed() is not value:
            raise RuntimeError(
                f"{of} was to be computed together with {self.name}, and got something else than its result."
                " Take the fusion out: TEPrecision(fuse='none'), or its own entry in fusions."
            )


class Joint:
    """Linear layers that read one norm, computed as one product by the one that is called first."""

    def __init__(self, borrower: Borrower, norm: PassedOn, linears: Mapping[str, nn.Linear], calls: Calls) -> None:
        self._borrower, self._norm, self._calls = borrower, norm, calls
        self._names: dict[nn.Module, str] = {linear: name for name, linear in linears.items()}
        self._sizes = [linear.out_features for linear in linears.values()]
        self._value: Tensor | None = None
        self._parts: dict[nn.Module, Tensor] = {}

    def __call__(self, module: nn.Module, value: Tensor) -> Tensor:
        """Return the part of the product that is the output of ``module``."""
        if module not in self._parts:
            self._compute(module, value)
        elif value is not self._value:
            raise RuntimeError(
                f"{self._names[module]} got another value than the layer that was computed together with it."
                " Take the fusion out: TEPrecision(fuse='none'), or its own entry in fusions."
            )
        part = self._parts.pop(module)
        if not self._parts:
            self._value = None
        return part

    def _compute(self, module: nn.Module, value: Tensor) -> None:
        self._norm.check(self._names[module], value)
        self._calls.note(self._names[module], self._borrower, value)
        whole, self._value = self._borrower(value), value
        parts = whole.split(self._sizes, dim=-1) if len(self._sizes) > 1 else (whole,)
        self._parts = dict(zip(self._names, parts, strict=True))


# A global, not an attribute of the module: equal modules share their class, and therefore its compilation. With a
# forward on each instance, Dynamo would compile each layer until it gives up.
_COMPUTED: dict[nn.Module, Compute] = {}
COMPUTED_WITHIN: set[nn.Module] = set()  # layers of a network that is computed as one


class computed_by:  # noqa: N801  (a context manager, not a generator: an unreferenced generator would end by itself)
    """Use ``compute(module, value)`` as the forward of ``module`` while the context is open.

    The module gets a subclass of its class, with the same name; a copy or a pickle of it has the original class.
    """

    def __init__(self, module: nn.Module, compute: Compute) -> None:
        self._module, self._compute, self._plain = module, compute, type(module)
        self._ours = _computed_class(self._plain, passing=isinstance(compute, PassedOn))

    def __enter__(self) -> None:
        self._module.__class__, _COMPUTED[self._module] = self._ours, self._compute

    def __exit__(self, *_: object) -> None:
        del _COMPUTED[self._module]  # from here on its own forward runs
        if type(self._module) is self._ours:  # otherwise FSDP2 has put its own class over it
            self._module.__class__ = self._plain


def is_computed(module: nn.Module) -> bool:
    """Return whether the forward of ``module``, or of a module that it is fused into, is currently replaced."""
    return module in _COMPUTED or module in COMPUTED_WITHIN


@lru_cache(maxsize=256)
def _computed_class(plain: type[nn.Module], *, passing: bool) -> type[nn.Module]:
    inner = plain.forward

    @hidden_from_dynamo
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        compute = _COMPUTED.get(self)
        return inner(self, *args, **kwargs) if compute is None else compute(self, _only(args, kwargs))

    def pass_on(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # In a graph, tensors are not recognized by identity, and the reader does not check.
        return _only(args, kwargs) if torch.compiler.is_compiling() else forward(self, *args, **kwargs)

    def reduce(self: nn.Module, protocol: Any) -> Any:  # noqa: ARG001
        # With an older protocol: newer ones require the class of the module.
        make, arguments, *state = plain.__reduce_ex__(self, 1)
        return make, tuple(plain if argument is ours else argument for argument in arguments), *state

    # Defined in this file and not in torch.nn: Dynamo assumes that it knows the forwards of modules defined there.
    names = {"__module__": __name__, "__qualname__": plain.__qualname__, "__doc__": plain.__doc__}
    methods = {"forward": pass_on if passing else forward, "__reduce_ex__": reduce}
    ours = new_class(plain.__name__, (plain,), exec_body=lambda body: body.update({**names, **methods}))
    return ours


def _only(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    (value,) = (*args, *kwargs.values())
    return value
