"""What the code of a module says of its training step: how often it goes backward, and which outputs it uses."""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any, Literal, NamedTuple

from torch import nn

__all__ = ["Place", "repeated_backward", "uses_only_loss"]

Kind = Literal["create_graph", "retain_graph"]

_WORDS: dict[str, Kind] = {
    "create_graph": "create_graph",
    "hessian": "create_graph",
    "hvp": "create_graph",
    "vhp": "create_graph",
    "retain_graph": "retain_graph",
}
_NOT_THE_USERS = {"torch", "lightning", "pytorch_lightning", "torchmetrics", "lightning_ups"}
_DEPTH = 3  # of calls that are followed from a method of a module


class Place(NamedTuple):
    """Where code asks for another backward."""

    kind: Kind
    word: str
    where: str


def repeated_backward(model: nn.Module) -> Place | None:
    """Return where the code of ``model`` keeps a graph for another backward, or None.

    It looks for the arguments ``create_graph`` and ``retain_graph`` in the methods of each module, and in the functions
    that these call by name. ``create_graph`` comes first: gradients of gradients need more than a graph that is kept.
    """
    seen: set[CodeType] = set()
    classes = {base: None for module in model.modules() for base in type(module).__mro__ if _is_users(base)}
    functions = [method for base in classes for value in vars(base).values() for method in _functions(value)]
    places = [place for function in functions for place in _places(function, seen, depth=_DEPTH)]
    return min(places, key=lambda place: place.kind != "create_graph", default=None)


def _is_users(thing: Any) -> bool:
    return str(getattr(thing, "__module__", None)).partition(".")[0] not in {*_NOT_THE_USERS, "builtins", "None"}


def _functions(value: Any) -> Iterator[FunctionType]:
    value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    while value is not None:  # through decorators
        if isinstance(value, FunctionType):
            yield value
        value = getattr(value, "__wrapped__", None)


def _places(function: FunctionType, seen: set[CodeType], *, depth: int) -> Iterator[Place]:
    codes = [*_codes(function.__code__)]
    if function.__code__ in seen:
        return
    seen.update(codes)
    names = [name for code in codes for name in (*code.co_names, *_keywords(code))]
    for name in names:
        if name in _WORDS:
            yield Place(_WORDS[name], name, f"{function.__module__}.{function.__qualname__}")
    if depth:
        for called in _called(function, names):
            yield from _places(called, seen, depth=depth - 1)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _keywords(code: CodeType) -> Iterator[str]:
    for constant in code.co_consts:
        if isinstance(constant, tuple):  # the names of a call's arguments
            yield from (word for word in constant if isinstance(word, str))
        elif constant in ("create_graph", "retain_graph"):  # as in backward(**{"create_graph": True})
            yield constant


def _called(function: FunctionType, names: list[str]) -> Iterator[FunctionType]:
    for name in names:
        value = function.__globals__.get(name)
        if isinstance(value, ModuleType) and value.__name__.partition(".")[0] not in _NOT_THE_USERS:
            values = [vars(value).get(other) for other in names]
        else:
            values = [value]
        for each in values:
            if isinstance(each, FunctionType) and _is_users(each):
                yield each


# What may be read of a model beside its outputs. Other methods may call its forward.
_PLAIN_ATTRIBUTES = {
    *("config", "device", "dtype", "training", "eval", "train", "generate"),
    *("parameters", "named_parameters", "buffers", "named_buffers", "modules", "named_modules", "state_dict"),
}
_BASES = (
    "builtins",
    "abc",
    "typing",
    "torch.nn.",
    "lightning.pytorch.core.",
    "lightning.fabric.",
)  # of a LightningModule
_NOT_IN_A_STEP = (
    "__init__",
    "configure_",
    "on_",
    "validation_",
    "test_",
    "predict_",
    "setup",
    "teardown",
    "prepare_data",
)


def uses_only_loss(model: nn.Module, name: str) -> bool:
    """Return whether the training step of ``model`` uses nothing but the loss of what its submodule ``name`` returns.

    That is certain only where the code is plain: each call has ``.loss``, ``["loss"]`` or ``[0]`` behind it, or its
    result is assigned to a variable that is read in no other way. Whatever else is done with the submodule, or with
    ``self`` as a whole, counts as a use of all outputs.
    """
    try:
        outputs = [_Outputs(function, name) for function in _functions_of_a_step(type(model))]
    except (OSError, TypeError, SyntaxError):  # there is no source, as of a class that was made by exec
        return False
    return all(each.are_losses for each in outputs) and any(each.called for each in outputs)


def _functions_of_a_step(kind: type) -> Iterator[ast.FunctionDef]:
    """Yield the methods of a LightningModule that may run in its training step, nested functions apart."""
    known, reaches_overridden = set[str](), False
    for base in kind.__mro__:
        if base.__module__.startswith(_BASES):
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        methods = [
            node for each in tree.body for node in ast.iter_child_nodes(each) if isinstance(node, ast.FunctionDef)
        ]
        methods = [m for m in methods if not m.name.startswith(_NOT_IN_A_STEP)]
        yield from (m for m in methods if reaches_overridden or m.name not in known)
        known |= {m.name for m in methods}
        names = {n.id for m in methods for n in ast.walk(m) if isinstance(n, ast.Name)}
        reaches_overridden = reaches_overridden or "super" in names


class _Outputs:
    """What a function does with what the submodule ``name`` of its first argument returns."""

    def __init__(self, function: ast.FunctionDef, name: str) -> None:
        first = [*function.args.posonlyargs, *function.args.args][:1]
        self._self, self._name, self._function = first[0].arg if first else "", name, function
        self._parents = {child: node for node in ast.walk(function) for child in ast.iter_child_nodes(node)}
        self.called = False
        self.are_losses = all(map(self._is_plain, ast.walk(function)))

    def _is_plain(self, node: ast.AST) -> bool:
        parent = self._parents.get(node)
        if isinstance(node, ast.Constant) and node.value == self._name:
            return False  # as in getattr(self, "net")
        if isinstance(node, ast.Name) and node.id == self._self:
            if isinstance(parent, ast.Call) and parent.func is node:
                return self._is_loss(parent)
            return isinstance(parent, ast.Attribute)
        if self._is_attribute(node, self._name):
            if isinstance(parent, ast.Call) and parent.func is node:
                self.called = True
                return self._is_loss(parent)
            return isinstance(parent, ast.Attribute) and parent.attr in _PLAIN_ATTRIBUTES
        if self._is_attribute(node, "forward"):
            return isinstance(parent, ast.Call) and self._is_loss(parent)
        return True

    def _is_attribute(self, node: ast.AST, name: str) -> bool:
        owner = node.value if isinstance(node, ast.Attribute) and node.attr == name else None
        return isinstance(owner, ast.Name) and owner.id == self._self and isinstance(node.ctx, ast.Load)  # type: ignore[attr-defined]

    def _is_loss(self, call: ast.Call) -> bool:
        parent = self._parents[call]
        if isinstance(parent, ast.Return):
            return self._function.name == "forward"  # whose callers are looked at
        if isinstance(parent, ast.Assign) and len(parent.targets) == 1 and isinstance(parent.targets[0], ast.Name):
            variable = parent.targets[0].id
            reads = [n for n in ast.walk(self._function) if isinstance(n, ast.Name) and n.id == variable]
            return all(isinstance(n.ctx, ast.Store) or _takes_loss(n, self._parents[n]) for n in reads)
        return _takes_loss(call, parent)


def _takes_loss(node: ast.AST, parent: ast.AST) -> bool:
    if isinstance(parent, ast.Attribute):
        return parent.attr == "loss"
    is_item = isinstance(parent, ast.Subscript) and parent.value is node and isinstance(parent.slice, ast.Constant)
    return is_item and parent.slice.value in ("loss", 0)  # type: ignore[attr-defined]
