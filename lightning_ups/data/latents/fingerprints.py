"""What decides the latents of a sample: the encoder, and the sample as the dataset and its transform make it."""

import hashlib
import inspect
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_ups.data.workers import as_it_is

_SAMPLES = 8


def of_weights(encoder: nn.Module) -> str:
    """Return a digest of all weights and buffers."""
    digest = hashlib.blake2b(digest_size=16)
    _feed(digest, dict(encoder.state_dict()))
    return digest.hexdigest()


def of_code(encoder: nn.Module) -> str:
    """Return a digest of the configuration and of the source of each class, except those of torch."""
    kinds = {type(module) for module in encoder.modules()}
    known = sorted((kind.__module__, kind.__qualname__, _source(kind)) for kind in kinds)
    return hashlib.blake2b(repr((repr(encoder), known)).encode(), digest_size=16).hexdigest()


def of_samples(loader: DataLoader[Any]) -> tuple[str, bool]:
    """Return a digest of some samples of ``loader``, and whether they are equal with other random numbers."""
    total = len(loader.dataset)  # type: ignore[arg-type]
    chosen = sorted({place * (total - 1) // max(_SAMPLES - 1, 1) for place in range(_SAMPLES)}) if total else []
    # In a worker if the loader has workers: the dataset may open files that must not be shared with them.
    probes = DataLoader(
        _Probes(loader.dataset),
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


class _Probes(Dataset[tuple[str, str]]):
    """The digests of each sample under two seeds."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, index: int) -> tuple[str, str]:
        first, second = (self._digest(index, seed) for seed in (0, 1))
        return first, second

    def _digest(self, index: int, seed: int) -> str:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        digest = hashlib.blake2b(digest_size=16)
        _feed(digest, self._dataset[index])
        return digest.hexdigest()


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


def _source(kind: type[Any]) -> str:
    if kind.__module__.partition(".")[0] == "torch":
        return ""
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):  # defined in an interpreter
        return ""
