"""The state of all random number generators that a training step may use, as plain values."""

import random
import sys
import zlib
from collections.abc import Sequence
from typing import Any

import torch


def host_state(generators: Sequence[torch.Generator] = ()) -> dict[str, Any]:
    """Return the state of Python's, torch's and, if it is imported, NumPy's generator, and of ``generators``."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if (numpy := sys.modules.get("numpy")) is not None:
        name, keys, position, has_gauss, gauss = numpy.random.get_state()
        # As a tensor: checkpoints are read without creating NumPy arrays.
        keys = torch.from_numpy(keys.astype("int64"))
        state["numpy"] = (str(name), keys, int(position), int(has_gauss), float(gauss))
    if generators:
        state["generators"] = [generator.get_state() for generator in generators]
    return state


def restore_host_state(state: dict[str, Any], generators: Sequence[torch.Generator] = ()) -> None:
    """Restore the result of `host_state`."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(state["torch"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, keys.numpy().astype("uint32"), *rest))
    for generator, saved in zip(generators, state.get("generators", []), strict=False):
        generator.set_state(saved)


def random_state(generators: Sequence[torch.Generator] = ()) -> dict[str, Any]:
    """Return `host_state` and the state of this process's GPU, if it is used."""
    state = host_state(generators)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: dict[str, Any], generators: Sequence[torch.Generator] = ()) -> None:
    """Restore the result of `random_state`."""
    restore_host_state(state, generators)
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def seed_from(state: dict[str, Any], *, rank: int) -> None:
    """Seed all generators of a rank without saved state from that of another rank, reproducibly."""
    seed_host(zlib.crc32(state["torch"].numpy().tobytes()) + rank)


def seed_host(seed: int) -> None:
    """Seed Python's, torch's and, if it is imported, NumPy's generator."""
    random.seed(seed)
    torch.manual_seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)
