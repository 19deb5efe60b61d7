"""What the code of a module says of its training step: its backwards, the outputs it uses, what must run uncompiled."""

import ast
import builtins
import inspect
import sys
import textwrap
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

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
    # Python compiles calls of what a file imports in a way of their own.
    names = {name for code in _codes(function.__code__) for name in code.co_names if name in function.__globals__}
    homes = {name: getattr(function.__globals__[name], "__module__", None) for name in names}
    imports = "".join(f"import {name}\n" for name in sorted(names) if homes[name] != function.__module__)
    try:
        source = textwrap.indent(textwrap.dedent(inspect.getsource(function)), " ")
        module = ast.parse(f"{imports}class _:\n{source}")
    except (OSError, TypeError, SyntaxError):
        return None
    body = module.body[-1]
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


# What compiled code does otherwise, does too often, or waits for.
_UNFIT_WORDS = {
    *("data", "grad", "backward", "requires_grad", "inference_mode", "set_grad_enabled", "enable_grad"),
    *(
        "func",
        "vmap",
        "functional_call",
        "jvp",
        "vjp",
        "hessian",
        "jacobian",
        "autograd",
        "hooks",
        "saved_tensors_hooks",
    ),
    *(
        "item",
        "cpu",
        "numpy",
        "tolist",
        "print",
        "open",
        "input",
        "breakpoint",
        "exec",
        "eval",
        "compile",
        "checkpoint",
    ),
    *("next", "iter", "globals", "locals", "vars", "getattr", "setattr", "delattr", "super", "id", "hash"),
    *("random", "Generator", "generator", "get_rng_state", "fork_rng", "seed", "trainer", "optimizers", "logger"),
    *("set_rng_state", "manual_seed", "manual_backward", "lr_schedulers", "loggers", "modules", "children", "apply"),
}
_UNFIT_IN_MODULES = {
    "inference_mode",
    "set_grad_enabled",
    "print",
    "register_hook",
    "numpy",
    "np",
    "random",
    "autograd",
}
_LIGHTNINGS = {"log", "log_dict", "device", "dtype", "hparams", "training", "parameters"}
_CONSTANTS = (int, float, str, bool, type(None), tuple, torch.dtype, torch.device, torch.Size)
_CONTEXTS = {"no_grad", "autocast"}
_METRICS = "torchmetrics"


def unfit_for_compiling(model: nn.Module) -> str | None:
    """Return what stands in the way of compiling the training step of ``model`` as a whole, or None.

    It reads the source of the step, of the methods that it calls and of functions of the same package, and the names in
    the code of other functions and of the modules that it uses. What it cannot read stands in the way.
    """
    step = inspect.getattr_static(type(model), "training_step", None)
    if not isinstance(step, FunctionType) or not _is_users(step):
        return "training_step is no plain method of its class"
    return next(_Reading(model).unfit(step), None)


class _Reading:
    """What has been read of the training step of ``model``."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._seen: set[CodeType] = set()

    def unfit(self, function: FunctionType) -> Iterator[str]:
        """Yield what stands in the way in ``function`` and in what it calls."""
        if function.__code__ in self._seen:
            return
        self._seen.add(function.__code__)
        tree = _source(function)
        if tree is None or not {_last_name(each) for each in tree.decorator_list} <= _PLAIN_DECORATORS:
            yield f"the source of {function.__qualname__} cannot be read"
            return
        is_method = getattr(type(self._model), function.__name__, None) is function
        first = [*tree.args.posonlyargs, *tree.args.args][:1]
        own = first[0].arg if is_method and first else None
        local = {name for code in _codes(function.__code__) for name in (*code.co_varnames, *code.co_cellvars)}
        names = _Names(own, local, function.__globals__)
        parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        annotations = {
            inner
            for node in ast.walk(tree)
            for field in ("annotation", "returns", "decorator_list")
            for each in _listed(getattr(node, field, None))
            for inner in ast.walk(each)
        }
        for node in ast.walk(tree):
            if node is not tree and node not in annotations:
                yield from (f"{function.__qualname__} {why}" for why in self._unfit(node, parents, names))

    def _unfit(self, node: ast.AST, parents: Mapping[ast.AST, ast.AST], names: "_Names") -> Iterator[str]:
        if isinstance(node, _UNFIT_NODES):
            yield f"has a {type(node).__name__.lower()}"
        elif isinstance(node, ast.With):
            if unknown := [i for i in node.items if _last_name(i.context_expr) not in _CONTEXTS]:
                yield f"enters {ast.unparse(unknown[0].context_expr)}"
        elif isinstance(node, (ast.AugAssign, ast.Assign, ast.AnnAssign, ast.Delete)):
            targets = [node.target] if isinstance(node, (ast.AugAssign, ast.AnnAssign)) else node.targets
            yield from self._writes([inner for each in targets for inner in ast.walk(each)], node, names)
        elif isinstance(node, ast.ImportFrom):
            home = sys.modules.get(node.module or "")
            for each in node.names:
                yield from self._value(each.name, getattr(home, each.name, _MISSING))
        elif isinstance(node, ast.keyword) and node.arg in ("out", "inplace", "generator"):
            yield f"calls something with {node.arg}"
        elif isinstance(node, ast.Attribute):
            if node.attr in _UNFIT_WORDS or node.attr.startswith("register_"):
                yield f"uses {node.attr}"
            elif node.attr.endswith("_"):
                yield f"writes in place, by {node.attr}"
            elif isinstance(node.value, ast.Name) and isinstance(node.ctx, ast.Load):
                yield from self._read(node, names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield from self._named(node, parents.get(node), names)

    def _writes(self, targets: list[ast.AST], node: ast.AST, names: "_Names") -> Iterator[str]:
        for target in targets:
            if not isinstance(target, (ast.Attribute, ast.Subscript)) or isinstance(target.ctx, ast.Load):
                continue
            root: ast.AST = target
            while isinstance(root, (ast.Attribute, ast.Subscript)):
                root = root.value
            is_local = isinstance(root, ast.Name) and root.id in names.local and root.id != names.own
            if is_local and isinstance(target, ast.Subscript):
                continue
            is_own = isinstance(root, ast.Name) and root.id == names.own and isinstance(node, ast.Assign)
            if is_own and isinstance(target, ast.Attribute) and root is target.value and self._may_keep(target.attr):
                continue
            yield f"writes to {ast.unparse(target)}"

    def _may_keep(self, name: str) -> bool:
        """Return whether the step may keep a tensor as ``name``: a number would be compiled for each of its values."""
        found = vars(self._model).get(name)
        held = (self._model._parameters, self._model._buffers, self._model._modules)
        is_new = not any(name in each for each in held) and not hasattr(type(self._model), name)
        return is_new and (found is None or isinstance(found, Tensor))

    def _named(self, node: ast.Name, parent: ast.AST | None, names: "_Names") -> Iterator[str]:
        if node.id == names.own:
            if isinstance(parent, ast.Call) and parent.func is node:
                yield from self._method("forward")
            elif not isinstance(parent, ast.Attribute):
                yield "passes the module on as a whole"
        elif node.id not in names.local:
            yield from self._value(node.id, names.globals.get(node.id, getattr(builtins, node.id, _MISSING)))

    def _read(self, node: ast.Attribute, names: "_Names") -> Iterator[str]:
        assert isinstance(node.value, ast.Name)
        if node.value.id == names.own:
            yield from self._own(node.attr)
        elif node.value.id not in names.local and isinstance(module := names.globals.get(node.value.id), ModuleType):
            yield from self._value(node.attr, getattr(module, node.attr, _MISSING))

    def _own(self, name: str) -> Iterator[str]:
        held = {**self._model._parameters, **self._model._buffers, **self._model._modules, **vars(self._model)}
        if name not in held:
            yield from self._method(name)
            return
        value = held[name]
        if isinstance(value, nn.Module):
            yield from _unfit_module(value)
        elif not isinstance(value, (Tensor, *_CONSTANTS)) and name not in _LIGHTNINGS:
            yield f"uses self.{name}, a {type(value).__name__}"

    def _method(self, name: str) -> Iterator[str]:
        value = inspect.getattr_static(type(self._model), name, None)
        if name in _LIGHTNINGS and not _is_users(value):
            return
        functions = [*_functions(value)]
        if functions and all(map(_is_users, functions)):
            for function in functions:
                yield from self.unfit(function)
        elif not isinstance(value, _CONSTANTS) or value is None:
            yield f"uses self.{name}"

    def _value(self, name: str, value: Any) -> Iterator[str]:
        """Yield what stands in the way in the value of a global name, or of an attribute of a module."""
        home = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        is_torchs = str(home).partition(".")[0] in ("torch", "builtins", "_operator", "math", "operator", "typing")
        if name in _UNFIT_WORDS or name.endswith("_"):
            yield f"uses {name}"
        elif isinstance(value, FunctionType) and not is_torchs:
            is_own = str(home).partition(".")[0] == type(self._model).__module__.partition(".")[0]
            if is_own:
                yield from self.unfit(value)
            elif found := _unfit_names([value], depth=_DEPTH):
                yield f"calls {name}, which uses {min(found)}"
        elif isinstance(value, ModuleType):
            if not is_torchs and home in _UNFIT_MODULES:
                yield f"uses {name}"
        elif not (is_torchs or isinstance(value, (*_CONSTANTS, BuiltinFunctionType))):
            yield f"uses {name}"


class _Names(NamedTuple):
    """The names in a function: of the module, of variables, and of the file around it."""

    own: str | None
    local: set[str]
    globals: Mapping[str, Any]


_MISSING = object()
_UNFIT_NODES = (
    *(ast.Global, ast.Nonlocal, ast.Yield, ast.YieldFrom, ast.Await, ast.AsyncFor, ast.AsyncWith, ast.Try),
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.NamedExpr),
)
_UNFIT_MODULES = {"random", "numpy", "time", "logging", "warnings", "os", "sys"}


def _listed(value: Any) -> list[ast.AST]:
    return value if isinstance(value, list) else [value] if isinstance(value, ast.AST) else []


def _unfit_module(module: nn.Module) -> Iterator[str]:
    for each in module.modules():
        if type(each).__module__.partition(".")[0] == _METRICS:
            yield f"updates a metric, {type(each).__name__}"
        if draws(each):
            yield f"draws random numbers, in a {type(each).__name__}"
    classes = {base: None for each in module.modules() for base in type(each).__mro__ if _is_users(base)}
    for base in classes:
        functions = [f for value in vars(base).values() for f in _functions(value) if not f.__name__.startswith("__")]
        if found := _unfit_names(functions, depth=_DEPTH):
            yield f"calls a {base.__name__}, which uses {min(found)}"


def _unfit_names(functions: list[FunctionType], *, depth: int) -> set[str]:
    """Return the names that stand in the way in the code of ``functions``, which others than the user have written."""
    found = set[str]()
    for function in functions if depth else ():
        names = [name for code in _codes(function.__code__) for name in code.co_names]
        found |= {name for name in names if name in _UNFIT_IN_MODULES or _is_operator(function.__globals__.get(name))}
        found |= _unfit_names([*_called(function, names)], depth=depth - 1)
    return found


def _is_operator(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, torch.autograd.Function)


def draws(module: nn.Module) -> bool:
    """Return whether ``module`` itself says that it draws random numbers in training, as a dropout does."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    rates = (vars(module).get(name) for name in ("dropout", "drop_prob", "dropout_p"))
    return isinstance(module, nn.RReLU) or any(isinstance(rate, float) and rate > 0 for rate in rates)
