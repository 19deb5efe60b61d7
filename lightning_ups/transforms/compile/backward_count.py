"""Finding code that goes backward more than once through one forward, which compiled code allows only in part."""

from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any, Literal, NamedTuple

from torch import nn

__all__ = ["Place", "repeated_backward"]

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
