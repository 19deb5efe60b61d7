"""Turns off the key-value cache of models during training."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_ups.transforms.on_module import OnModule

_OFF = OnModule[list[Any]]("kv_cache")  # configs below a module whose cache is off


@contextmanager
def without_kv_cache(module: nn.Module) -> Iterator[list[str]]:
    """Set ``use_cache`` to False in every config below ``module`` while the context is open.

    Models of transformers have the cache on by default. In training it is useless, recomputation fills it a second
    time, and a compiled block is recompiled for each layer index. ``generate`` uses the generation config, which is not
    changed.

    Yields:
        The names of the changed settings, such as ``model.config.text_config.use_cache``.
    """
    found = {name: config for name, config in _configs(module) if getattr(config, "use_cache", None) is True}
    changed: list[Any] = []
    outer = _OFF.get(module) or []
    _OFF.keep(module, [*outer, *found.values()])
    try:
        for config in found.values():
            config.use_cache = False
            changed.append(config)
        yield [f"{name}.use_cache" for name in found]
    finally:
        for config in changed:
            config.use_cache = True
        if outer:
            _OFF.keep(module, outer)
        else:
            _OFF.drop(module)


@contextmanager
def kv_cache_as_before(module: nn.Module) -> Iterator[None]:
    """Show the original values that `without_kv_cache` has changed, while configs are saved."""
    turned_off = _OFF.get(module) or []
    for config in turned_off:
        config.use_cache = True
    try:
        yield
    finally:
        for config in turned_off:
            config.use_cache = False


def _configs(module: nn.Module) -> Iterator[tuple[str, Any]]:
    seen: set[int] = set()  # the modules of one model share its config
    for name, child in module.named_modules():
        yield from _nested(f"{name}.config".lstrip("."), vars(child).get("config"), seen)


def _nested(name: str, config: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if not hasattr(config, "__dict__") or isinstance(config, (type, nn.Module)) or id(config) in seen:
        return
    seen.add(id(config))
    yield name, config
    for key, value in vars(config).items():
        if type(value).__name__.endswith("Config"):  # such as text_config, vision_config, decoder
            yield from _nested(f"{name}.{key}", value, seen)
