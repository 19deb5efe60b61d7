"""Private names of Lightning's Trainer and of its command line's parser, and its other package name."""

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_NO_SETTING = {"_HelpAction", "_ActionHelpClassPath", "_ActionPrintConfig", "_ActionConfigLoad"}
_STAND_INS = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}


def are_placeholders(optimizers: Sequence[Any]) -> bool:
    """Return whether a Trainer has created ``optimizers`` itself, because the module returned None."""
    return any(type(optimizer).__name__ == "_MockOptimizer" for optimizer in optimizers)


def trainer_of(module: Any) -> Any:
    """Return the Trainer of a LightningModule, or None if it has none, for which ``module.trainer`` raises."""
    return getattr(module, "_trainer", None)


def config_of_cli(trainer: Any) -> Any:
    """Return the callback by which LightningCLI saves its configuration, or None if no LightningCLI made `trainer`."""
    cli = sys.modules.get("lightning.pytorch.cli")
    kind = cli.SaveConfigCallback if cli else ()
    return next((callback for callback in trainer.callbacks if isinstance(callback, kind)), None)


def automatic_specs(parser: Any, settings: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the optimizers and schedulers that LightningCLI adds to the module by itself, by key.

    Each is as in YAML, with ``class_path`` and ``init_args``, or None if the user has not given it.
    """
    optimizers, schedulers = (
        {key: _spec(kind, settings.get(key)) for key, (kind, link_to) in register.items() if link_to == "AUTOMATIC"}
        for register in (parser._optimizers, parser._lr_schedulers)
    )
    return optimizers, schedulers


def _spec(kind: type | tuple[type, ...], given: Any) -> Any:
    if isinstance(kind, tuple):
        return given  # one of them, named by the user
    return {"class_path": f"{kind.__module__}.{kind.__name__}", "init_args": {} if given is None else given.as_dict()}


def setting_types(parser: Any) -> dict[str, Any]:
    """Return each key that a jsonargparse parser accepts, with its type, or None if it has none."""
    from jsonargparse import ActionConfigFile

    return {
        action.dest: getattr(action, "_typehint", None) or action.type
        for action in parser._actions
        if type(action).__name__ not in _NO_SETTING and not isinstance(action, ActionConfigFile)
    }


def linked(parser: Any) -> set[str]:
    """Return each key whose value is linked from another key, or from another object."""
    links = getattr(parser, "_links_group", None)
    return {link.target[0] for link in links._group_actions} if links else set()


def class_settings(kind: Callable[..., Any]) -> dict[str, Any]:
    """Return each setting that YAML may give to ``kind``, a class or a function, with its type."""
    from lightning.pytorch.cli import LightningArgumentParser

    parser = LightningArgumentParser(exit_on_error=False)
    # Arguments that the command line itself gives to optimizers and schedulers.
    taken = inspect.signature(kind).parameters
    given: set[str | int] = {
        n for n in ("params", "optimizer") if n in taken and taken[n].default is inspect.Parameter.empty
    }
    add: Any = parser.add_class_arguments if isinstance(kind, type) else parser.add_function_arguments
    add(kind, "it", fail_untyped=False, skip=given)
    return {key.removeprefix("it."): hint for key, hint in setting_types(parser).items()}


@contextmanager
def stand_in_for_pytorch_lightning(say: Callable[[str], None]) -> Iterator[None]:
    """Let ``import pytorch_lightning`` return ``lightning.pytorch`` within this context; ``say`` it the first time.

    The two packages contain the same code as different classes, and the Trainer of one refuses modules and callbacks of
    the other. A package that is already imported is not replaced.
    """
    finder = _StandIn({name: real for name, real in _STAND_INS.items() if name not in sys.modules}, say)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in finder.entered:
            sys.modules.pop(name, None)


class _StandIn(MetaPathFinder):
    def __init__(self, names: dict[str, str], say: Callable[[str], None]) -> None:
        self.names, self.say = names, say
        self.entered: list[str] = []

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, dot, inner = fullname.partition(".")
        if package not in self.names:
            return None
        real = f"{self.names[package]}{dot}{inner}"
        if find_spec(real) is None:
            return None
        if not self.entered:
            self.say(f"{package} is imported: {self.names[package]} stands in for it.")
        self.entered.append(fullname)
        return ModuleSpec(fullname, _TheSame(real))


class _TheSame(Loader):
    """Loads a module that exists under another name."""

    def __init__(self, real: str) -> None:
        self._real = real
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._real)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has set the spec of the stand-in
