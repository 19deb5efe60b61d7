"""What the code of a module says of its training step: how often it goes backward, and which outputs it uses."""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any, Literal, NamedTuple

from torch import nn

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


_BASES = (
    "builtins",
    "abc",
    "typing",
    "torch.nn.",
    "lightning.pytorch.core.",
    "lightning.fabric.",
)  # of a LightningModule
# Hooks in which all outputs may be used: no other method may call them.
_EVALUATES = {"validation_step", "test_step", "predict_step"}
# What may be read of a model beside its outputs. Other methods may call its forward.
_PLAIN_ATTRIBUTES = {
    *("config", "device", "dtype", "training", "eval", "train", "generate"),
    *("parameters", "named_parameters", "buffers", "named_buffers", "state_dict"),
}
_PLAIN_DECORATORS = {"override", "staticmethod", "classmethod", "property"}
# By these names code finds a submodule without naming it.
_WAYS_IN = {
    *("getattr", "vars", "__dict__", "__call__", "forward", "lightning_module", "get_submodule"),
    *("modules", "named_modules", "children", "named_children", "_modules"),
}


def uses_only_loss(model: nn.Module, name: str) -> bool:
    """Return whether the training step of ``model`` uses nothing but the loss of what its submodule ``name`` returns.

    That is certain only where all methods of the class are plain: each call of the submodule has ``.loss`` or
    ``["loss"]`` behind it, or its result is assigned to a variable that is read in no other way. Whatever else is done
    with the submodule, or with ``self`` as a whole, counts as a use of all outputs.
    """
    bases = [base for base in type(model).__mro__ if not base.__module__.startswith(_BASES)]
    if {"training_step", "forward"} & vars(model).keys() or any("forward" in vars(base) for base in bases):
        return False
    outputs = []
    for method in (method for base in bases for value in vars(base).values() for method in _functions(value)):
        if method.__name__ in _EVALUATES:
            continue
        tree = _source(method)
        if tree is None:
            return False
        outputs.append(_Outputs(tree, name))
    return all(each.are_losses for each in outputs) and any(each.called for each in outputs)


def _source(function: FunctionType) -> ast.FunctionDef | None:
    """Return the source of ``function`` if it can be had, and is what the function was made of."""
    try:
        module = ast.parse("class _:\n" + textwrap.indent(textwrap.dedent(inspect.getsource(function)), " "))
    except (OSError, TypeError, SyntaxError):
        return None
    (body,) = module.body
    tree = body.body[0] if isinstance(body, ast.ClassDef) else None
    if not isinstance(tree, ast.FunctionDef):
        return None
    made = [code for code in _codes(compile(module, "", "exec")) if code.co_name == function.__name__]
    is_it = any(
        code.co_code == function.__code__.co_code and code.co_names == function.__code__.co_names for code in made
    )
    return tree if is_it else None


class _Outputs:
    """What a method does with what the submodule ``name`` of its first argument returns."""

    def __init__(self, function: ast.FunctionDef, name: str) -> None:
        first = [*function.args.posonlyargs, *function.args.args][:1]
        self._self, self._name, self._function = first[0].arg if first else "", name, function
        self._parents = {child: node for node in ast.walk(function) for child in ast.iter_child_nodes(node)}
        self.called = False
        decorators = {_last_name(each) for each in function.decorator_list}
        self.are_losses = decorators <= _PLAIN_DECORATORS and all(map(self._is_plain, ast.walk(function)))

    def _is_plain(self, node: ast.AST) -> bool:
        parent = self._parents.get(node)
        if isinstance(node, ast.Constant):
            return node.value != self._name  # as in operator.attrgetter("net")
        if isinstance(node, ast.Name):
            if node.id == "super":
                call = self._parents[parent] if parent is not None else None
                return isinstance(call, ast.Attribute) and call.attr == "__init__"
            return node.id not in _WAYS_IN and (node.id != self._self or isinstance(parent, ast.Attribute))
        if not isinstance(node, ast.Attribute):
            return True
        if node.attr in _WAYS_IN | _EVALUATES:
            return False
        if node.attr != self._name:
            return True
        if not (isinstance(node.value, ast.Name) and node.value.id == self._self):
            return False
        if isinstance(node.ctx, ast.Store):
            return self._is_only_name(node)
        if isinstance(parent, ast.Call) and parent.func is node:
            self.called = True
            return self._is_loss(parent)
        return isinstance(parent, ast.Attribute) and parent.attr in _PLAIN_ATTRIBUTES

    def _is_only_name(self, target: ast.Attribute) -> bool:
        """Return whether no variable keeps what is assigned to ``target`` for another use."""
        assignment: ast.AST = target
        while not isinstance(assignment, ast.Assign):
            if not isinstance(assignment, (ast.Attribute, ast.Tuple)):
                return False
            assignment = self._parents[assignment]
        values = assignment.value.elts if isinstance(assignment.value, ast.Tuple) else [assignment.value]
        names = {value.id for value in values if isinstance(value, ast.Name)}
        reads = [n for n in ast.walk(self._function) if isinstance(n, ast.Name) and n.id in names]
        return all(
            n in values or isinstance(n.ctx, ast.Store) or isinstance(self._parents[n], ast.Attribute) for n in reads
        )

    def _is_loss(self, call: ast.Call) -> bool:
        parent = self._parents[call]
        if isinstance(parent, ast.Assign) and len(parent.targets) == 1 and isinstance(parent.targets[0], ast.Name):
            variable = parent.targets[0].id
            reads = [n for n in ast.walk(self._function) if isinstance(n, ast.Name) and n.id == variable]
            return all(isinstance(n.ctx, ast.Store) or _takes_loss(n, self._parents[n]) for n in reads)
        return _takes_loss(call, parent)


def _last_name(node: ast.expr) -> str:
    node = node.func if isinstance(node, ast.Call) else node
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _takes_loss(node: ast.AST, parent: ast.AST) -> bool:
    if isinstance(parent, ast.Attribute):
        return parent.attr == "loss" and isinstance(parent.ctx, ast.Load)
    is_item = isinstance(parent, ast.Subscript) and parent.value is node and isinstance(parent.slice, ast.Constant)
    return is_item and parent.slice.value == "loss" and isinstance(parent.ctx, ast.Load)  # type: ignore[attr-defined]
