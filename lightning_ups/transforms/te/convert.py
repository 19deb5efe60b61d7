"""Lets Transformer Engine compute linear layers, norms and feed-forward networks, in place and reversibly."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn

from lightning_ups._compat.optional.te import begin_scales, forget_scales, holds_engine_modules, scales, set_scales
from lightning_ups.transforms.blocks import find_blocks, select_names
from lightning_ups.transforms.casting import kept_in_float32, name_other_layers, within
from lightning_ups.transforms.te.forward import COMPUTED_WITHIN, Calls, Joint, PassedOn, computed_by, is_computed
from lightning_ups.transforms.te.fusions import Fusion, fusions_in
from lightning_ups.transforms.te.modules import (
    Borrower,
    Norm,
    Slot,
    lay_together,
    linear_for,
    norm_for,
    norm_linear_for,
    norm_mlp_for,
)

Fuse = Literal["auto", "all", "none"]
MULTIPLE = 16  # float8 products require multiples of this in both dimensions of a weight
_NOT_INCLUDED, _OUTSIDE = "not included", "outside the blocks"


@dataclass(frozen=True, kw_only=True)
class TEConversion:
    """The result of a conversion, and its state.

    Args:
        converted: The class of Transformer Engine that computes each module, by name; for a norm in a fusion, the class
            of the fusion.
        skipped: Why other modules are not converted, by name.
        apart: Why norms of known blocks are not fused, by name.
        theirs: Modules of Transformer Engine that the model itself contains.
        nothing: Why nothing is converted, or nothing that computes in float8, although it should be.
        calls: Records which modules ran.
        borrowers: The modules of Transformer Engine, by the name of the (first) module that each computes.
    """

    converted: Mapping[str, str]
    skipped: Mapping[str, str]
    apart: Mapping[str, str]
    theirs: Sequence[str]
    nothing: str | None
    calls: Calls
    borrowers: Mapping[str, Borrower] = field(repr=False)
    _undo: ExitStack = field(repr=False)

    @property
    def kinds(self) -> Counter[str]:
        """The number of modules of each class of Transformer Engine."""
        return Counter(borrower.kind for borrower in self.borrowers.values())

    def lay_together(self) -> None:
        """Give weights that are computed as one product a common memory, on the device on which they stay."""
        for slots in self._joined():
            lay_together(slots)

    def undo(self) -> None:
        """Restore each module's own forward, with its current weights."""
        self._undo.close()
        for slots in self._joined():
            for slot in slots:
                if slot.value.untyped_storage().nbytes() > slot.value.numel() * slot.value.element_size():
                    slot.value.data = slot.value.data.clone()
        if not self.theirs:  # otherwise theirs would be dropped, too
            forget_scales()

    def scales(self) -> dict[str, dict[str, Tensor]]:
        """Return the scales and maxima of delayed scaling, by module name."""
        found = {name: scales(borrower.module) for name, borrower in self.borrowers.items()}
        return {name: state for name, state in found.items() if state}

    def begin_scales(self, *, recipe: Any) -> None:
        """Initialize missing scales of delayed scaling with values that do not flush gradients to zero."""
        for borrower in self.borrowers.values():
            if borrower.num_products:
                begin_scales(borrower.module, recipe=recipe, num_products=borrower.num_products)

    def set_scales(self, state: Mapping[str, Mapping[str, Tensor]], *, recipe: Any) -> list[str]:
        """Restore scales, and return the names of the modules without any, which start from initial values."""
        products = {name: borrower for name, borrower in self.borrowers.items() if borrower.num_products}
        for name, borrower in products.items():
            if name in state:
                set_scales(borrower.module, state[name], recipe=recipe, num_products=borrower.num_products)
        return [name for name in products if name not in state]

    def _joined(self) -> Iterator[tuple[Slot, ...]]:
        for borrower in self.borrowers.values():
            yield from (slots for slots in borrower.slots.values() if len(slots) > 1)


def convert_to_te(
    module: nn.Module,
    *,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    head: bool = False,
    fuse: Fuse = "auto",
    fusions: Iterable[Fusion] = (),
    sharded: bool = False,
    multiple: int = MULTIPLE,
    once: bool = False,
    in_float32: Sequence[str] = (),
    in_float8: bool = False,
    losers: Mapping[str, str] | None = None,
) -> TEConversion:
    """Let Transformer Engine compute linear layers, norms and networks of ``module``, in place; names do not change.

    Some modules are left out, each with its reason: linear layers whose dimensions are not multiples of ``multiple``,
    modules with their own forward, norms that Transformer Engine does not have, and, unless ``head`` or ``include``
    says otherwise, modules outside the blocks that repeat.

    Args:
        module: The module.
        include: Patterns of linear layers and norms. None: those in the blocks.
        exclude: Patterns of modules to leave out.
        head: Also convert modules outside of the blocks.
        fuse: Whether norms of known blocks are fused with the layers that read them: ``"all"``, ``"none"``, or
            ``"auto"``, which under sharding leaves out fusions that would join weights of separate gathers.
        fusions: More fusions, by patterns.
        sharded: Whether FSDP2 gathers the parameters.
        multiple: The dimensions of weights must be multiples of this.
        once: Whether each module may run only once in a training step.
        in_float32: Patterns of submodules that compute in float32, and are left out with everything inside.
        in_float8: Whether the products are in float8, so that converting only norms is not enough.
        losers: Modules to leave out because they would be slower, with the reason, by name.

    Raises:
        ValueError: If a pattern matches nothing.
    """
    precise = within(kept_in_float32(module, in_float32).values())
    calls = Calls(rows=32 if multiple > MULTIPLE else 8, once=once)
    work = _Work(module, precise=precise, sharded=sharded, calls=calls)
    work.choose(include=include, exclude=exclude, head=head, multiple=multiple)
    work.leave(losers or {})
    asked = [*fusions]
    with ExitStack() as undo:
        work.fuse(asked, ready=fuse != "none", joining=fuse == "all" or not sharded, undo=undo)
        work.convert_rest(undo=undo)
        theirs = holds_engine_modules(module)
        return TEConversion(
            converted=work.converted,
            skipped=work.skipped,
            apart=work.apart,
            theirs=theirs,
            nothing=None if theirs else _why_nothing(work, module, in_float8=in_float8, multiple=multiple),
            calls=work.calls,
            borrowers=work.borrowers,
            _undo=undo.pop_all(),
        )


def _why_nothing(work: "_Work", module: nn.Module, *, in_float8: bool, multiple: int) -> str | None:
    name, others = type(module).__name__, name_other_layers(module)
    some = "; ".join(f"{name}: {why}" for name, why in [*work.skipped.items()][:4])
    left = work.left_by_selection(multiple=multiple)  # include=[...] helps nowhere else
    if not work.converted:
        cure = "Name others by include=[...], or use BF16Precision." if left else "Use BF16Precision."
        return (
            f"Nothing of {name} can be computed by Transformer Engine. {some or 'It has no linear layer and no norm'}."
            f"{others} {cure}"
        )
    if in_float8 and not any(borrower.num_products for borrower in work.borrowers.values()):
        is_linear = any(isinstance(m, nn.Linear) for m in left)
        cure = "Name linear layers by include=[...], or use" if is_linear else "Use"
        return (
            f"Of {name} Transformer Engine can compute norms alone, and nothing in float8."
            f" {some or 'It has no nn.Linear in its blocks'}.{others}"
            f" {cure} recipe=None, or BF16Precision."
        )
    return None


class _Work:
    """A conversion in progress."""

    def __init__(self, module: nn.Module, *, precise: Set[nn.Module], sharded: bool, calls: Calls) -> None:
        self._root, self._precise, self._sharded, self.calls = module, precise, sharded, calls
        self._modules: dict[str, Any] = {name: m for name, m in module.named_modules() if name}
        self._candidates = {name: m for name, m in self._modules.items() if _is_candidate(m)}
        self._losers: Mapping[str, str] = {}
        self.converted: dict[str, str] = {}
        self.skipped: dict[str, str] = {}
        self.apart: dict[str, str] = {}
        self.borrowers: dict[str, Borrower] = {}

    def choose(self, *, include: Sequence[str] | None, exclude: Sequence[str], head: bool, multiple: int) -> None:
        """Find out for each linear layer and norm why it is left out, if it is."""
        names, of = self._candidates, type(self._root).__name__
        for name, pattern in (_selected(names, exclude, of=of) if exclude else {}).items():
            self.skipped[name] = f"excluded by {pattern!r}"
        if include is not None:
            included = _selected(names, include, of=of)
            self.skipped |= {name: _NOT_INCLUDED for name in names if name not in included}
        elif not head:
            inside = {inner for block in find_blocks(self._root).values() for inner in block.modules()}
            self.skipped |= {name: _OUTSIDE for name, m in names.items() if m not in inside}
        for name, m in names.items():
            if m in self._precise:
                self.skipped[name] = "computes in float32"
            elif name not in self.skipped and (why := _unfit(m, multiple=multiple)):
                self.skipped[name] = why

    def leave(self, losers: Mapping[str, str]) -> None:
        """Leave out modules that would be slower, and their fusions, even if the user named them."""
        self._losers = losers
        self.skipped |= {name: losers[name] for name in self._candidates if name in losers and name not in self.skipped}

    def left_by_selection(self, *, multiple: int) -> list[nn.Module]:
        """Return the modules that ``include`` could convert."""
        selected = {name for name, why in self.skipped.items() if why in (_NOT_INCLUDED, _OUTSIDE)} - {*self._losers}
        return [m for name, m in self._candidates.items() if name in selected and not _unfit(m, multiple=multiple)]

    def fuse(self, asked: Sequence[Fusion], *, ready: bool, joining: bool, undo: ExitStack) -> None:
        """Make the fusions, those of the user first."""
        for fusion in [*fusions_in(self._root, asked, ready=False)]:
            if any(name in self._losers for name in (fusion.norm, *fusion.parts)):
                continue
            if why := self._unfusable(fusion, joining=True):
                raise ValueError(f"The fusion of {fusion.norm} with {', '.join(fusion.parts)} cannot be made: {why}.")
            self._fuse(fusion, undo)
        for fusion in [*fusions_in(self._root, (), ready=ready)]:
            if fusion.norm in self.converted:
                continue
            if why := self._unfusable(fusion, joining=joining):
                self.apart[fusion.norm] = why
            else:
                self._fuse(fusion, undo)

    def convert_rest(self, *, undo: ExitStack) -> None:
        """Convert the modules that are in no fusion."""
        for name, m in self._candidates.items():
            if name in self.converted or name in self.skipped:
                continue
            if isinstance(m, nn.Linear):
                self._compute(name, m, linear_for(m, name=name, sharded=self._sharded), undo)
            else:
                self._compute(name, m, norm_for(m, name=name, sharded=self._sharded), undo)

    def _compute(self, name: str, module: nn.Module, borrower: Borrower, undo: ExitStack) -> None:
        calls = self.calls

        def compute(_: nn.Module, value: Tensor) -> Any:
            calls.note(name, borrower, value)
            return borrower(value)

        undo.enter_context(computed_by(module, compute))
        self.borrowers[name], self.converted[name] = borrower, borrower.kind

    def _unfusable(self, fusion: Fusion, *, joining: bool) -> str | None:
        layers = [*fusion.linears, *fusion.first, *([fusion.second] if fusion.second else [])]
        if fusion.joins and not joining:
            return "their weights are gathered apart, and joining them would copy them in every forward"
        for name in (fusion.norm, *layers):
            if name not in self._candidates:
                return f"{name} is no {'norm' if name == fusion.norm else 'linear layer'} that is known"
            if name in self.converted:
                return f"{name} is in another fusion"
            if name in self.skipped:
                return f"{name} is left out: {self.skipped[name]}"
        if fusion.mlp is not None and (why := self._own_way(self._modules[fusion.mlp])):
            return f"{fusion.mlp} {why}"
        linears = self._named(layers).values()
        if not isinstance(Norm.of(self._modules[fusion.norm]), Norm):  # a linear layer is none either
            return f"{fusion.norm} is no norm that is known"
        if any(hooked := [n for n in (fusion.norm, *fusion.parts) if _has_hooks(self._modules[n])]):
            return f"{hooked[0]} has hooks, which would see other values"
        if len({linear.bias is None for linear in linears}) > 1:
            return "some of the layers have a bias, and others have none"
        return self._misfit(fusion)

    def _own_way(self, mlp: nn.Module) -> str | None:
        if any(part in self._precise for part in mlp.modules()):  # such as an activation, which would not be called
            return "has a part that computes in float32"
        return _own_forward(mlp)

    def _misfit(self, fusion: Fusion) -> str | None:
        width = self._modules[fusion.norm].weight.numel()
        readers = self._named((*fusion.linears, *fusion.first)).values()
        if {linear.in_features for linear in readers} != {width}:
            return f"{fusion.norm} is {width} wide, and its readers are not"
        if len({linear.weight.dtype for linear in readers}) > 1:
            return "the layers have weights of different types"
        if fusion.second is not None:
            last = self._modules[fusion.second]
            gated = fusion.activation.endswith("glu")
            if len(fusion.first) != 1 + gated:
                return f"the activation {fusion.activation!r} needs {1 + gated} first layers"
            if {linear.out_features for linear in readers} != {last.in_features}:
                return f"{fusion.second} is not as wide as the first layers"
            if last.out_features != width:
                return f"{fusion.second} does not return the width of the norm"
        return None

    def _fuse(self, fusion: Fusion, undo: ExitStack) -> None:
        norm, passed = (fusion.norm, self._modules[fusion.norm]), PassedOn(fusion.norm)
        if fusion.mlp is None:
            linears = self._named(fusion.linears)
            borrower, name = norm_linear_for(norm, linears, sharded=self._sharded), fusion.linears[0]
            joint = Joint(borrower, passed, linears, self.calls)
            for linear in linears.values():
                undo.enter_context(computed_by(linear, joint))
        else:
            first, name = self._named(fusion.first), fusion.mlp
            second = str(fusion.second), self._modules[str(fusion.second)]
            borrower = norm_mlp_for(norm, first, second, activation=fusion.activation, sharded=self._sharded)
            undo.enter_context(computed_by(self._modules[name], _reading(passed, name, borrower, self.calls)))
            inside = {*first.values(), second[1]}
            COMPUTED_WITHIN.update(inside)
            undo.callback(COMPUTED_WITHIN.difference_update, inside)
        undo.enter_context(computed_by(norm[1], passed))
        self.borrowers[name] = borrower
        self.converted |= dict.fromkeys((fusion.norm, *fusion.parts), borrower.kind)

    def _named(self, names: Iterable[str]) -> dict[str, nn.Linear]:
        return {name: self._modules[name] for name in names}


def _reading(passed: PassedOn, name: str, borrower: Borrower, calls: Calls) -> Any:
    def compute(_: nn.Module, value: Tensor) -> Any:
        passed.check(name, value)
        calls.note(name, borrower, value)
        return borrower(value)

    return compute


def _selected(names: Iterable[str], patterns: Sequence[str], *, of: str) -> dict[str, str]:
    return select_names(names, patterns, kind="linear layer or norm", of=of)


def _is_candidate(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or Norm.of(module) is not None


def _unfit(module: nn.Module, *, multiple: int) -> str | None:
    if why := _own_forward(module):
        return why
    if not isinstance(module, nn.Linear):
        what = Norm.of(module)
        return what if isinstance(what, str) else None
    if type(module).__name__ == "NonDynamicallyQuantizableLinear":
        return "nn.MultiheadAttention reads its weight without calling it"
    if type(module).forward is not nn.Linear.forward:
        return "has its own forward"
    if not isinstance(vars(module)["_parameters"].get("weight"), nn.Parameter):
        return "its weight is computed from others, by a parametrization, weight norm or pruning"
    if any(size % multiple for size in (module.in_features, module.out_features)):
        return f"{module.in_features} x {module.out_features} is no multiple of {multiple}"
    return None


def _own_forward(module: nn.Module) -> str | None:
    if is_computed(module):
        return "is computed by Transformer Engine already"
    return "has its own forward" if "forward" in vars(module) else None


def _has_hooks(module: nn.Module) -> bool:
    return any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks))
