"""What is wrong with a configuration that the parser refuses: each place, the reason, and the nearest right name.

The parser stops at the first fault, and tells how it tried one type after the other. This looks again at the layers,
key by key, with the classes that they name.
"""

import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import is_dataclass
from enum import Enum
from importlib.util import find_spec
from traceback import extract_tb
from types import ModuleType, NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from jsonargparse import ArgumentError, ArgumentParser
from lightning.pytorch.strategies import Strategy, StrategyRegistry
from torch import Tensor

from lightning_ups._compat.lightning.trainer import class_settings
from lightning_ups.config.layers import Keys, Layer, Tree, items
from lightning_ups.config.spelling import nearest, suggestion

__all__ = ["diagnosis", "find_class", "ignored", "offered", "stray", "unfilled"]

_ROOMS = ("callbacks", "data", "models", "precision", "strategies")  # whose classes are for configurations

_NULL = (None, "null", "~")  # and as it is typed
_SPEC = ("class_path", "init_args", "dict_kwargs")
_PLAIN = (int, float, complex, str, bool, bytes, list, tuple, dict, set, frozenset, NoneType, object, type, Tensor)


def _never(_: str) -> bool:
    return False


def diagnosis(
    types: Mapping[str, Any],
    layers: Sequence[Layer],
    error: Exception,
    *,
    required: Sequence[str],
    may_be_null: Callable[[str], bool] = _never,
) -> str:
    """Return every fault of the configuration, a line each, or else what the parser said, shortened.

    Args:
        types: What is taken: each key and its type.
        layers: What it was given, the strongest last.
        error: What it raised.
        required: Keys that must be given.
        may_be_null: Whether a key takes null though its type does not, as where that is the default.
    """
    look = _Look(types, layers, may_be_null)
    sought = (look.hollow, look.section)
    faults = [fault for layer in layers for seek in sought for fault in seek(layer.tree, types, (), layer)]
    faults = faults or look.missing(required)
    return "\n".join(dict.fromkeys(faults)) or _said_by_parser(str(error))


def ignored(
    types: Mapping[str, Any], layers: Sequence[Layer], *, may_be_null: Callable[[str], bool] = _never
) -> list[str]:
    """Return where a configuration that the parser takes has nothing for a setting that wants something.

    That is an empty mapping for one that does not exist, and null for one that takes none. The parser passes over
    these, though it refuses any other value there. The arguments are those of `diagnosis`.
    """
    look = _Look(types, layers, may_be_null)
    return list(dict.fromkeys(fault for layer in layers for fault in look.hollow(layer.tree, types, (), layer)))


def unfilled(key: str, kind: type, settings: Mapping[str, Any], layers: Sequence[Layer]) -> str | None:
    """Return what ``kind`` needs, at ``key``, and nothing gives, though the parser has let it pass.

    It makes None of an argument that has neither a default nor an annotation; one that is given null has that.

    Args:
        key: Where the class is.
        kind: The class.
        settings: What it is about to be made with, but for what comes from elsewhere.
        layers: What the parser was given.
    """
    annotated = inspect.signature(kind).parameters
    lacking = [
        name
        for name in _without_default(kind)
        if annotated[name].annotation is inspect.Parameter.empty
        and settings.get(name, name) is None
        and not any(_mentions(layer.tree.get(key), name) for layer in layers)
    ]
    return _needs(key, kind, lacking) if lacking else None


def _mentions(tree: Any, name: str) -> bool:
    return isinstance(tree, dict) and (name in tree or any(_mentions(value, name) for value in tree.values()))


def _needs(key: str, kind: type, lacking: Sequence[str]) -> str:
    return (
        f"{key}: {kind.__name__} needs {' and '.join(lacking)}. There is no default."
        f" Give it under init_args, or by --{key}.{lacking[0]} VALUE."
    )


def stray(word: str) -> str:
    """Return what to say of a word that belongs to no option."""
    bare = word.lstrip("-")
    key, equals, value = bare.partition("=")
    file = value if key in ("c", "config") else "" if equals else word
    if file.endswith((".yaml", ".yml")):
        cure = f"Write --config {file}."
    elif equals or (word != bare and key[1:] and key[0].isalpha()):
        cure = f"Write --{bare}."
    else:
        cure = "Write --KEY VALUE, such as --trainer.max_steps 100."
    why = "A file of settings is given by --config, and a setting by its key."
    return f"{word!r} belongs to no option. {why} {cure}"


def find_class(name: str, bases: Sequence[type]) -> type | None:
    """Return the class that YAML means by ``name``: a path to import, or the name of a class below ``bases``."""
    module, _, attribute = name.rpartition(".")
    if not module:
        # The bases first: Lightning's ReduceLROnPlateau has the name of torch's.
        return next((kind for kind in (*bases, *_below(bases)) if kind.__name__ == name), None)
    if not _is_path(module):  # which the import would refuse in words of its own
        return None
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except ModuleNotFoundError:
        return None
    return found if isinstance(found, type) else None


def offered(path: str) -> bool:
    """Return whether the class of this name is for users to name: of ours, those that a room for it exports."""
    package, _, rest = path.partition(".")
    room, name = rest.partition(".")[0], path.rpartition(".")[2]
    return package != "lightning_ups" or (room in _ROOMS and name in sys.modules[f"{package}.{room}"].__all__)


class _Look:
    def __init__(self, types: Mapping[str, Any], layers: Sequence[Layer], may_be_null: Callable[[str], bool]) -> None:
        self.types, self.layers, self.may_be_null = types, layers, may_be_null

    def section(
        self, tree: Tree, types: Mapping[str, Any], keys: Keys, layer: Layer, *, owner: type | None = None
    ) -> Iterator[str]:
        """Yield the faults of settings that go by ``types``: the parser's, or those of the class ``owner``."""
        for name, value, where in _entries(tree, types, keys, layer):
            if name in types:
                if not self._is_wrong_null(name, value, types[name], layer, owner):  # which is told already
                    yield from self.value(value, types[name], where, layer)
            elif f"{name}.enabled" in types and (value is None or isinstance(value, bool)):
                continue  # a section that is switched on or off
            elif below := _below_section(name, types):
                yield f"{layer.place(*where)}: {_dotted(where)} is {value!r}. It holds settings, such as {below}."
            else:
                yield from self._unknown(name, types, where, layer, owner)

    def hollow(
        self, tree: Tree, types: Mapping[str, Any], keys: Keys, layer: Layer, *, owner: type | None = None
    ) -> Iterator[str]:
        """Yield the settings that are null and take none, and empty mappings that none takes; the rest is as above."""
        for name, value, where in _entries(tree, types, keys, layer):
            if name in types and self._is_wrong_null(name, value, types[name], layer, owner):
                yield f"{layer.place(*where)}: {_dotted(where)} is null. It takes {_described(types[name])}."
            elif name in types and _has_hollow(value):
                yield from self._hollow_spec(value, _classes(types[name]), where, layer)
            elif _is_hollow(value):
                yield from self._unknown(name, types, where, layer, owner)

    def _is_wrong_null(self, name: str, value: Any, hint: Any, layer: Layer, owner: type | None) -> bool:
        # What is typed for a class is read as YAML; elsewhere the parser has refused it, or takes it for text.
        is_null = value in _NULL if owner and not layer.lines else value is None
        if not is_null or _takes_null(hint):
            return False
        # Without a default it is not given, which the parser says itself where no other layer gives it.
        return name not in _without_default(owner) if owner else not self.may_be_null(name)

    def _hollow_spec(self, value: Any, bases: Sequence[type], keys: Keys, layer: Layer) -> Iterator[str]:
        if isinstance(value, list):
            for index, item in enumerate(value):
                yield from self._hollow_spec(item, bases, (*keys, index), layer)
        elif isinstance(value, dict) and bases:
            name = value.get("class_path") or self._class_path(keys)
            given = value.get("init_args")
            kind = find_class(name, bases) if isinstance(name, str) else None
            if kind is not None and isinstance(given, dict):
                yield from self.hollow(given, class_settings(kind), (*keys, "init_args"), layer, owner=kind)

    def _unknown(
        self, name: str, types: Mapping[str, Any], keys: Keys, layer: Layer, owner: type | None
    ) -> Iterator[str]:
        place = f"{layer.place(*keys)}: "
        typed = () if layer.lines or owner else ("debug",)  # taken out of the words before
        near = nearest(name, {*typed, *(known[:end] for known in types for end in _ends(known))})
        if owner is None:
            section = f"{name.rpartition('.')[0]}."
            siblings = {known.removeprefix(section) for known in types if known.startswith(section)}
            cure = f"Did you mean {near!r}?" if near else _known(siblings or {key.partition(".")[0] for key in types})
            yield f"{place}there is no setting {name!r}. {cure}"
        elif near or not _takes_more(owner):
            takes = f"It takes {', '.join(types)}." if types else "It takes none."
            yield f"{place}{owner.__name__} has no setting {name!r}. {takes}" + (
                f" Did you mean {near!r}?" if near else ""
            )
        else:
            yield f"{place}{owner.__name__} names no setting {name!r}, but takes others. Give it under dict_kwargs."

    def value(self, value: Any, hint: Any, keys: Keys, layer: Layer) -> Iterator[str]:
        """Yield the faults of a value of a known type."""
        bases = _classes(hint)
        if _accepts(value, hint):
            return
        if isinstance(value, list) and bases and _takes_list(hint):
            for index, item in enumerate(value):
                yield from self.value(item, hint, (*keys, index), layer)
        elif isinstance(value, dict) and bases:
            yield from self._spec(value, bases, hint, keys, layer)
        elif isinstance(value, str) and bases and not _takes_text(hint):
            faults = [*self._class(value, bases, keys, layer)]
            yield from faults or _lacking(find_class(value, bases), (), keys, layer)
        else:
            near = _choice(value, hint)
            listed = f", as in [{value!r}]" if isinstance(value, str) and _takes_strings(hint) else ""
            cure = f"Did you mean {near!r}?" if near else f"It takes {_described(hint)}{listed}."
            yield f"{layer.place(*keys)}: {_dotted(keys)} is {value!r}. {cure}"

    def _spec(self, spec: Tree, bases: Sequence[type], hint: Any, keys: Keys, layer: Layer) -> Iterator[str]:
        given = spec.get("class_path")
        name = given or self._class_path(keys)
        wrong = [key for key in spec if key not in _SPEC]
        if wrong:
            kind = find_class(name, bases) if isinstance(name, str) else None
            setting = kind is not None and wrong[0] in class_settings(kind)
            yield (
                f"{layer.place(*keys, wrong[0])}: {_dotted(keys)} has the key {wrong[0]!r}. A class is given by"
                " class_path, and its settings by init_args."
                f" {'Put it below init_args.' if setting else suggestion(wrong[0], _SPEC)}"
            )
        elif not isinstance(name, str):
            yield (
                f"{layer.place(*keys)}: {_dotted(keys)} names no class. It takes {_described(hint)}."
                " Give one by class_path, and its settings by init_args."
            )
        elif faults := [*self._class(name, bases, (*keys, "class_path") if given else keys, layer)]:
            yield from faults
        elif (kind := find_class(name, bases)) is not None:
            given = spec.get("init_args") or {}
            yield from self.section(given, class_settings(kind), (*keys, "init_args"), layer, owner=kind)
            yield from _lacking(kind, given, keys, layer)

    def _class(self, name: str, bases: Sequence[type], keys: Keys, layer: Layer) -> Iterator[str]:
        place, wanted = f"{layer.place(*keys)}: ", " or ".join(base.__name__ for base in bases)
        if (known := find_class(name, bases) or self._of_another_setting(name)) is not None:
            if not issubclass(known, tuple(bases)):
                yield f"{place}{name} is no {wanted}. {self._right_place(known)}"
            return
        if Strategy in bases and name.lower() in StrategyRegistry:
            entry = StrategyRegistry[name.lower()]
            made = entry["strategy"] if isinstance(entry["strategy"], type) else None
            kind = made.__name__ if made else entry["description"].rpartition(".")[2]  # ours are imported late
            # Processes are started anew by any that is not told otherwise.
            said = ", ".join(f"{key}={value!r}" for key, value in entry["init_params"].items() if value != "popen")
            yield (
                f"{place}{name!r} is the name of a strategy, and takes no settings. One with settings is given by its"
                f" class. Write {kind!r}{said and f', with {said}'}."
            )
            return
        module, _, attribute = name.rpartition(".")
        file = re.sub(r"\.py(?=[/:]|$)", "", name)
        path = ".".join(filter(None, re.split("[./:]", file)))  # of a file, or with a slip
        meant = _of_module(path, bases) or (path != name and find_class(path, bases) and f"Did you mean {path!r}?")
        if not _is_path(module) or path != name or meant:
            example = f"{path}.CLASS" if path != name or module else f"package.module.{name}"
            concrete = [kind for kind in _below(bases) if not inspect.isabstract(kind)]
            names = {kind.__name__ for kind in concrete if offered(f"{kind.__module__}.{kind.__name__}")}
            near = suggestion(name, names) if path == name else "Run where it can be imported."
            yield (
                f"{place}no {wanted} is known as {name!r}. A class of your own is named with its module,"
                f" as in {example!r}. {meant or near}"
            )
            return
        try:
            found = getattr(importlib.import_module(module), attribute, None)
        except ModuleNotFoundError as error:
            yield place + _missing_module(name, module, error, bases)
            return
        if found is None:
            classes = {key: kind for key, kind in vars(sys.modules[module]).items() if isinstance(kind, type)}
            fitting = [key for key, kind in classes.items() if issubclass(kind, tuple(bases))]
            alone = f"Write {attribute!r} alone." if find_class(attribute, bases) else None
            cure = alone or suggestion(attribute, fitting or classes)
            yield f"{place}the module {module} has no {attribute!r}. {cure}"

    def _of_another_setting(self, name: str) -> type | None:
        found = (find_class(name, bases) for hint in self.types.values() if (bases := _classes(hint)))
        return next(filter(None, found), None)

    def _right_place(self, kind: type) -> str:
        right = (key for key, hint in self.types.items() if issubclass(kind, tuple(_classes(hint))))
        return f"It is for {key}. Put it there." if (key := next(right, None)) else "Name a subclass of it."

    def _class_path(self, keys: Keys) -> str | None:
        """Return the class that a layer gives at ``keys``, for one that gives only its settings."""
        for layer in reversed(self.layers):
            spec = _at(layer.tree, keys)
            name = spec.get("class_path") if isinstance(spec, dict) else spec
            if isinstance(name, str):
                return name
        return None

    def missing(self, required: Sequence[str]) -> list[str]:
        """Return which keys, and which settings without a default of a class that is named, no layer gives."""
        faults = [
            f"No {key!r} is given. There is no default. Name a class, by class_path below {key!r}, or by --{key} CLASS."
            for key in required
            if self._class_path((key,)) is None
        ]
        for key, hint in self.types.items():
            keys, bases = (*key.split("."),), _classes(hint)
            kind = find_class(name, bases) if bases and (name := self._class_path(keys)) else None
            given = {arg for layer in self.layers for arg in _at(layer.tree, (*keys, "init_args")) or ()}
            lacking = [arg for arg in _without_default(kind) if arg not in given] if kind else []
            if kind and lacking:
                faults.append(_needs(key, kind, lacking))
        return faults


def _entries(
    tree: Tree, types: Mapping[str, Any], keys: Keys, layer: Layer, *, inside: str = ""
) -> Iterator[tuple[str, Any, Keys]]:
    """Yield the name, the value and the place of each setting, those in sections too."""
    for key, value in tree.items():
        name, where = f"{inside}{key}".removesuffix("+"), (*keys, key)
        if name in types or not isinstance(value, dict) or not _below_section(name, types):
            yield name, value, where
            continue
        if not layer.lines and [*value] == ["init_args"]:  # typed, of a class that the program has fixed
            value = value["init_args"]
        yield from _entries(value, types, where, layer, inside=f"{name}.")


def _below_section(name: str, types: Mapping[str, Any]) -> str | None:
    return next((known for known in types if known.startswith(f"{name}.")), None)


def _is_hollow(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_hollow, value.values()))


def _has_hollow(value: Any) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return value == {} or value in _NULL or any(map(_has_hollow, inner))


def _ends(name: str) -> list[int]:
    return [*(dot.start() for dot in re.finditer(r"\.", name)), len(name)]


def _lacking(kind: type | None, given: Collection[str], keys: Keys, layer: Layer) -> Iterator[str]:
    # Of an element of a list; for other classes another layer may give it.
    lacking = (
        [name for name in _without_default(kind) if name not in given] if kind and isinstance(keys[-1], int) else []
    )
    if kind and lacking:
        needs = f"{kind.__name__} needs {' and '.join(lacking)}. There is no default."
        yield f"{layer.place(*keys)}: {needs} Give it under init_args."


def _known(names: set[str]) -> str:
    return f"There are {', '.join(sorted(names))}."


def _dotted(keys: Keys) -> str:
    return re.sub(r"\.\[", "[", ".".join(f"[{key}]" if isinstance(key, int) else key for key in keys))


def _at(tree: Any, keys: Keys) -> Any:
    for key in keys:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def _below(bases: Sequence[type]) -> Iterator[type]:
    for base in bases:
        yield base
        yield from _below(type.__subclasses__(base))


def _classes(hint: Any) -> list[type]:
    """Return the classes of which ``hint`` takes instances, to be given by a ``class_path``."""
    if isinstance(hint, tuple):  # jsonargparse: any of these
        return [kind for each in hint for kind in _classes(each)]
    if get_args(hint) and get_origin(hint) is not Literal:
        return list(dict.fromkeys(kind for each in get_args(hint) for kind in _classes(each)))
    if not isinstance(hint, type) or hint in _PLAIN or issubclass(hint, Enum):
        return []
    return [] if hasattr(hint, "__fspath__") or is_dataclass(hint) else [hint]


def _takes_null(hint: Any) -> bool:
    """Return whether ``hint`` takes null; one that is no class, or made of such, may."""
    if isinstance(hint, tuple) or get_origin(hint) in (Union, UnionType):
        return any(map(_takes_null, hint if isinstance(hint, tuple) else get_args(hint)))
    if get_origin(hint) is Literal:
        return None in get_args(hint)
    kind = get_origin(hint) or hint
    return kind in (Any, NoneType, object) or not isinstance(kind, type)


def _takes_text(hint: Any) -> bool:
    return hint is str or (get_origin(hint) in (Union, UnionType) and any(map(_takes_text, get_args(hint))))


def _takes_list(hint: Any) -> bool:
    if isinstance(hint, tuple):  # jsonargparse: any of these
        return any(map(_takes_list, hint))
    kind = get_origin(hint) or hint
    if kind in (Union, UnionType):
        return any(map(_takes_list, get_args(hint)))
    return isinstance(kind, type) and issubclass(kind, Iterable)


def _takes_strings(hint: Any) -> bool:
    """Return whether ``hint`` takes a list of any strings."""
    kind, among = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return any(map(_takes_strings, among))
    return isinstance(kind, type) and issubclass(kind, Sequence) and among[:1] == (str,)


def _takes_more(kind: type) -> bool:
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in inspect.signature(kind).parameters.values())


def _without_default(kind: type) -> list[str]:
    settings = class_settings(kind)
    parameters = inspect.signature(kind).parameters
    return [name for name, parameter in parameters.items() if parameter.default is parameter.empty and name in settings]


def _accepts(value: Any, hint: Any) -> bool:
    if hint is None:
        return True
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--it", type=hint)
    try:
        parser.parse_object({"it": deepcopy(value)})  # it writes into lists
    except ArgumentError:
        return False
    return True


def _described(hint: Any) -> str:
    return " or ".join(dict.fromkeys(_flat(hint)))


def _flat(hint: Any) -> Iterator[str]:
    if get_origin(hint) in (Union, UnionType):
        for each in get_args(hint):
            yield from _flat(each)
    elif get_origin(hint) is Literal:
        yield from map(repr, get_args(hint))
    elif hint is NoneType:
        yield "null"
    elif isinstance(hint, type) and issubclass(hint, Enum):
        yield from (repr(each.name) for each in hint)
    elif isinstance(hint, type) and not get_args(hint):
        yield hint.__name__
    else:
        yield re.sub(r"\b(\w+\.)+", "", str(hint))


def _choice(value: Any, hint: Any) -> str | None:
    """Return the choice that was probably meant by ``value``, or by the first wrong one in it."""
    choices = _choices(hint)
    wrong = [item for item in items(value) if item not in choices]
    return nearest(str(wrong[0]), map(str, choices)) if wrong else None


def _choices(hint: Any) -> list[Any]:
    if get_origin(hint) is Literal:
        return [*get_args(hint)]
    if isinstance(hint, type) and issubclass(hint, Enum):
        return [each.name for each in hint]
    return [choice for each in get_args(hint) for choice in _choices(each)]


def _of_module(name: str, bases: Sequence[type]) -> str | None:
    """Return which class is probably meant by the name of a module."""
    module = sys.modules.get(name)
    if module is None and all(part.isidentifier() for part in name.split(".")):
        try:
            module = importlib.import_module(name) if find_spec(name) is not None else None
        except ImportError:
            return None
    own = _own(module, bases) if module is not None else []
    return f"Did you mean '{name}.{own[0]}'?" if own else None


def _own(module: ModuleType, bases: Sequence[type]) -> list[str]:
    """Return the names of the classes below ``bases`` that a module defines."""
    kinds = {key: kind for key, kind in vars(module).items() if isinstance(kind, type)}
    own = {key: kind for key, kind in kinds.items() if kind.__module__ == module.__name__}
    return [key for key, kind in own.items() if issubclass(kind, tuple(bases))]


def _is_path(module: str) -> bool:
    return all(module.split("."))  # "./net" and "net." have a part that is empty


def _missing_module(name: str, module: str, error: ModuleNotFoundError, bases: Sequence[type]) -> str:
    missing = error.name or module
    if module == missing or module.startswith(f"{missing}."):
        parent, _, leaf = missing.rpartition(".")
        if parent and not hasattr(sys.modules[parent], "__path__"):  # a file, such as my.py of "my.py.MyModule"
            near = nearest(name.rpartition(".")[2], _own(sys.modules[parent], bases))
            cure = f"Did you mean '{parent}.{near}'?" if near else f"Name a class of it, as in '{parent}.CLASS'."
            return f"{name}: there is no module {missing!r}. {parent} is one file, and holds none. {cure}"
        path = sys.modules[parent].__path__ if parent else None
        near = nearest(leaf, [found.name for found in pkgutil.iter_modules(path)], cutoff=0.75)
        right = f"{parent}.{near}" if parent else near
        cure = f"Did you mean {name.replace(missing, str(right), 1)!r}?" if near else "Run where it can be imported."
        return f"{name}: there is no module {missing!r}. It is looked for here and among what is installed. {cure}"
    frame = extract_tb(error.__traceback__)[-1]
    return (
        f"{name} cannot be imported. {frame.filename}:{frame.lineno} imports {missing!r}, which is not installed."
        f" Run: pip install {missing.partition('.')[0]}"
    )


def _said_by_parser(text: str) -> str:
    if found := re.match(r"[Uu]nrecognized arguments: (?!--)(\S+)", text):
        return stray(found[1])
    noise = ("Subtypes:", "Errors:", "Given value", "Does not validate", "- Expected a <class 'NoneType'>")
    lines = [line.strip() for line in text.splitlines()]
    return " ".join([line for line in lines if line and not line.startswith(noise)][:4])
