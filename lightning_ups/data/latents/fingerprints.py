"""What decides the latents of a sample: the encoder, collate_fn, the batch hooks, and the sample itself."""

import hashlib
import os
import random
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, cached_property, partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_ups.data.workers import as_it_is

SAMPLES = 8
BATCH_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_PLAIN = str | bytes | int | float | complex | bool | np.generic | torch.dtype | None
_OPAQUE = (Dataset, DataLoader, torch.device, ModuleType, type(os.environ))  # they differ where latents are the same
_MODULE = frozenset(vars(nn.Module()))


def of_weights(encoder: nn.Module) -> str:
    """Return a digest of all weights and buffers."""
    digest = hashlib.blake2b(digest_size=16)
    _feed(digest, _weights(encoder))
    return digest.hexdigest()


def of_code(encoder: nn.Module) -> str:
    """Return a digest of the configuration, the plain attributes and the code of each submodule."""
    content = _Content()
    content.add_module(encoder)
    return content.digest.hexdigest()


def of_hooks(collate: Callable[[Any], Any], data: LightningDataModule) -> str:
    """Return a digest of ``collate`` and of the batch hooks that ``data`` overrides, with the values that they read."""
    content = _Content()
    content.add(collate)
    content.add_reads(data, BATCH_HOOKS)
    return content.digest.hexdigest()


def of_samples(loader: DataLoader[Any]) -> tuple[str, bool]:
    """Return a digest of some samples of ``loader``, and whether they are equal with other random numbers."""
    total = len(loader.dataset)  # type: ignore[arg-type]
    chosen = sorted({place * (total - 1) // max(SAMPLES - 1, 1) for place in range(SAMPLES)}) if total else []
    # In a worker if the loader has workers: the dataset may open files that must not be shared with them.
    probes = DataLoader(
        _Probes(loader.dataset, loader.collate_fn),
        sampler=chosen,
        batch_size=None,
        collate_fn=as_it_is,
        num_workers=min(loader.num_workers, 1),
        multiprocessing_context=loader.multiprocessing_context if loader.num_workers else None,
        worker_init_fn=loader.worker_init_fn,
    )
    with isolate_rng(include_cuda=False):
        found = [*probes]
    return hashlib.blake2b(repr([first for first, _ in found]).encode(), digest_size=16).hexdigest(), all(
        first == second for first, second in found
    )


def under_two_seeds(make: Callable[[], Any]) -> tuple[str, str]:
    """Return digests of what ``make`` returns with one seed and with another."""
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        digest = hashlib.blake2b(digest_size=16)
        _feed(digest, make())
        found.append(digest.hexdigest())
    return found[0], found[1]


class _Probes(Dataset[tuple[str, str]]):
    """The digests of each sample, as a batch of one, under two seeds."""

    def __init__(self, dataset: Any, collate: Callable[[Any], Any]) -> None:
        self._dataset, self._collate = dataset, collate

    def __getitem__(self, index: int) -> tuple[str, str]:
        return under_two_seeds(lambda: self._collate([self._dataset[index]]))


class _Content:
    """A digest of values and of code, with the plain values and the functions that the code reads by name."""

    def __init__(self) -> None:
        self.digest = hashlib.blake2b(digest_size=16)
        self._seen: dict[Any, Any] = {}  # it keeps them alive, so that their ids stay theirs

    def add(self, value: Any) -> None:
        self._say(type(value).__qualname__)
        if isinstance(value, _PLAIN):
            self._say(value)
        elif isinstance(value, Tensor | np.ndarray):
            _feed(self.digest, value)
        elif isinstance(value, list | tuple):
            self._say(len(value))
            self._add_all(value)
        elif isinstance(value, dict):
            self._say(len(value))
            self._add_all(each for pair in value.items() for each in pair)
        elif isinstance(value, set | frozenset):
            self._say(sorted(map(_repr, value)))
        elif not isinstance(value, _OPAQUE) and id(value) not in self._seen:
            self._seen[id(value)] = value
            self._add_object(value)

    def add_module(self, module: nn.Module) -> None:
        """Add all but the weights."""
        self._say(_repr(module))
        for name, each in module.named_modules():
            self._seen[id(each)] = each
            self._say(name)
            self.add(type(each))
            self.add({name: value for name, value in vars(each).items() if name not in _MODULE})

    def add_reads(self, owner: Any, names: Iterable[str]) -> None:
        """Add the attributes of ``owner`` with ``names``, and those that its methods with these names read."""
        for name in sorted(names):
            if name.startswith("__") or (id(owner), name) in self._seen:
                continue
            self._seen[id(owner), name] = owner
            for place in (name, f"_{name}"):  # _hparams is behind hparams
                if place in getattr(owner, "__dict__", {}):
                    self._say(place)
                    self.add(vars(owner)[place])
            for kind in type(owner).__mro__:
                if name not in vars(kind) or _is_foundation(kind.__module__):
                    continue
                self._say(name)
                value = _function(vars(kind)[name])
                self.add(value)
                if isinstance(value, FunctionType):
                    self.add_reads(owner, _names(value.__code__))

    def _add_object(self, value: Any) -> None:
        if isinstance(value, CodeType):
            self._add_all((value.co_code, value.co_names, value.co_consts))
        elif isinstance(value, FunctionType):
            self._add_function(value)
        elif isinstance(value, type):
            self._add_class(value)
        elif isinstance(value, MethodType):
            self.add_reads(value.__self__, [value.__name__])
        elif isinstance(value, partial):
            self._add_all((value.func, value.args, value.keywords))
        elif isinstance(getattr(value, "__wrapped__", None), FunctionType):  # functools.cache
            self.add(value.__wrapped__)
        elif isinstance(value, LightningDataModule | LightningModule):
            pass  # its attributes are added where they are read
        elif isinstance(value, nn.Module):
            self.add_module(value)
            _feed(self.digest, _weights(value))
        elif isinstance(value, BuiltinFunctionType) or _is_installed(type(value).__module__):
            self._say(_repr(value))
        else:
            self.add(type(value))
            self.add(getattr(value, "__dict__", None))

    def _add_function(self, function: FunctionType) -> None:
        module = function.__globals__.get("__name__", "")
        self._say(function.__qualname__)
        if _is_foundation(module):
            self.add(getattr(function, "__wrapped__", None))  # torch.no_grad
            return
        self._add_all((function.__code__, function.__defaults__, function.__kwdefaults__))
        names = _names(function.__code__)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if name == "__class__":
                continue
            try:
                value = cell.cell_contents
            except ValueError:  # not yet assigned
                continue
            self.add(value)
            if isinstance(value, LightningDataModule | LightningModule):
                self.add_reads(value, names)
        if not _is_installed(module):
            self._add_names(function.__globals__, names)

    def _add_names(self, scope: Mapping[str, Any], names: set[str]) -> None:
        for name in sorted(names & scope.keys()):
            value = scope[name]
            if name.startswith("__"):
                continue
            self._say(name)
            self.add(value)
            if isinstance(value, ModuleType) and not _is_installed(value.__name__) and id(value) not in self._seen:
                self._seen[id(value)] = value
                self._add_names(vars(value), names)

    def _add_class(self, kind: type[Any]) -> None:
        self._say(kind.__qualname__)
        for base in kind.__mro__:
            if _is_foundation(base.__module__):
                continue
            for name, value in vars(base).items():
                each = _function(value)
                if isinstance(each, FunctionType) or not name.startswith("__"):
                    self._say(name)
                    self.add(each)

    def _add_all(self, values: Iterable[Any]) -> None:
        for value in values:
            self.add(value)

    def _say(self, value: Any) -> None:
        self.digest.update(f"{value!r};".encode())


def _function(value: Any) -> Any:
    """Return the function of a method, a property or the like."""
    if isinstance(value, staticmethod | classmethod):
        return value.__func__
    if isinstance(value, property):
        return value.fget
    return value.func if isinstance(value, cached_property) else value


def _names(code: CodeType) -> set[str]:
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return {*code.co_names}.union(*map(_names, inner))


def _repr(value: Any) -> str:
    return re.sub(r"0x[0-9a-fA-F]+", "", repr(value))


def _is_foundation(module: str) -> bool:
    """Return whether the code of a module takes no part in a digest."""
    top = module.partition(".")[0]
    return top in sys.stdlib_module_names or top in ("torch", "lightning", "pytorch_lightning", "numpy")


@cache
def _is_installed(module: str) -> bool:
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return _is_foundation(module) or "site-packages" in file or "dist-packages" in file


def _weights(module: nn.Module) -> dict[str, Any]:
    return {**module.state_dict(), **dict(module.named_buffers())}


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        host = value.detach().cpu().contiguous()
        digest.update(repr((host.dtype, tuple(host.shape))).encode())
        if host.numel():
            digest.update(host.reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, np.ndarray) or hasattr(value, "__array_interface__"):  # a picture
        array = np.ascontiguousarray(value)
        digest.update(repr((array.dtype.str, array.shape)).encode())
        digest.update(array.tobytes())
    elif isinstance(value, Mapping):
        for name, each in value.items():
            digest.update(repr(name).encode())
            _feed(digest, each)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        digest.update(f"{len(value)}".encode())
        for each in value:
            _feed(digest, each)
    elif isinstance(value, str | bytes | int | float | complex | bool | np.generic) or value is None:
        digest.update(repr(value).encode())
    else:
        digest.update(type(value).__qualname__.encode())
