"""What this machine is: processors, GPUs, packages that load, and variables, as the checks of ``doctor`` read them."""

import faulthandler
import importlib
import multiprocessing
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from typing_extensions import override

from lightning_ups._compat.environment import gpus, host, installed, relevant_variables
from lightning_ups._compat.optional.nvml import gpu_states
from lightning_ups.config.errors import broken_package, cure_of_broken


class Known(NamedTuple):
    """A package that a part of the suite, or of torch, can use."""

    name: str  # of the distribution
    module: str  # whose import shows that it loads
    cure: str  # what to run when it is missing


KNOWN = (
    Known("lightning", "lightning.pytorch", "pip install 'lightning>=2.6.6,<2.7'"),
    Known("jsonargparse", "jsonargparse", "pip install 'jsonargparse[signatures]>=4.37,<5'"),
    Known("tensorboard", "tensorboard", "pip install tensorboard"),
    Known("triton", "triton", "install a build of torch for CUDA, which brings it"),
    Known("torchao", "torchao.float8", "pip install 'torchao>=0.17'"),
    Known(
        "transformer-engine",
        "transformer_engine.pytorch",
        "pip install --no-build-isolation 'transformer-engine[pytorch]>=2.20'",
    ),
    Known("flash-attn-3", "flash_attn_interface", "build the folder 'hopper' of the flash-attention repository"),
    Known("flash-attn-4", "flash_attn.cute.interface", "pip install 'flash-attn-4>=4.0.0b1'"),
    Known("transformers", "transformers", "pip install transformers"),
    Known("safetensors", "safetensors.torch", "pip install safetensors"),
    Known("nvidia-ml-py", "pynvml", "pip install nvidia-ml-py"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """An installed package, and why it does not load, if it does not.

    Args:
        version: Its version.
        error: Why it does not load.
        cure: What to do about it, if the fault is in another package that it imports.
    """

    version: str | None
    error: str | None = None
    cure: str = ""

    @property
    def loads(self) -> bool:
        """Whether it was imported."""
        return self.error is None


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Everything that the checks read, so that a test can describe a machine that is not here."""

    host: Mapping[str, Any]
    gpus: Sequence[Mapping[str, Any]] = ()
    cuda: str | None = None  # what torch was built for
    has_nvidia: bool = False  # whether the system has an NVIDIA GPU, visible to torch or not
    packages: Mapping[str, Package] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    threads: int = 1
    unlinked: Sequence[tuple[int, int]] = ()  # pairs of GPUs that cannot reach each other's memory

    @property
    def capability(self) -> tuple[int, int] | None:
        """The compute capability of the weakest visible GPU, or None without one."""
        found = [(gpu["capability"][0], gpu["capability"][1]) for gpu in self.gpus]
        return min(found, default=None)

    @property
    def device(self) -> torch.device:
        """Where probes run."""
        return torch.device("cuda", 0) if self.gpus else torch.device("cpu")


def look() -> Machine:
    """Describe the machine that this process is on.

    Packages load in processes of their own, all at the same time; asking for one waits for it.
    """
    # Before CUDA is initialised: a process that was forked later could not use it.
    packages = _Packages()
    states = {state["index"]: state for state in gpu_states() or []}
    found = [gpu | states.get(gpu["index"], {}) for gpu in gpus()]
    return Machine(
        host=host(),
        gpus=found,
        cuda=torch.version.cuda,
        has_nvidia=Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidia0").exists(),
        packages=packages,
        environment=relevant_variables(),
        threads=torch.get_num_threads(),
        unlinked=_unlinked(len(found)),
    )


class _Packages(Mapping[str, Package]):
    """The installed packages; those that are still being imported are waited for when they are asked for."""

    def __init__(self) -> None:
        self._found = {"torch": Package(version=str(torch.__version__))}  # noqa: TID251  (shown, not compared)
        self._loading = {known.name: _Loading(known) for known in KNOWN if _is_installed(known)}

    @override
    def __getitem__(self, name: str) -> Package:
        if name not in self._found:
            self._found[name] = self._loading[name].package()
        return self._found[name]

    @override
    def __iter__(self) -> Iterator[str]:
        return iter({"torch": None} | self._loading)

    @override
    def __len__(self) -> int:
        return 1 + len(self._loading)


def _is_installed(known: Known) -> bool:
    # The top of the name only: looking below it would import it.
    return installed(known.name) is not None or find_spec(known.module.partition(".")[0]) is not None


class _Loading:
    """A package while a process of its own imports it: a wheel for another torch may take the interpreter with it."""

    def __init__(self, known: Known) -> None:
        self.known = known
        handle, said = tempfile.mkstemp()
        os.close(handle)
        self._said = Path(said)
        # Forked where that is possible, it has torch already.
        method = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
        context: Any = multiprocessing.get_context(method)
        self._process = context.Process(target=_import, args=(known.module, str(self._said)), daemon=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # that threads run, such as OpenBLAS's
            self._process.start()

    def package(self, *, patience_s: float = 90) -> Package:
        """Wait, and return what became of it."""
        try:
            return self._result(patience_s)
        finally:
            self._said.unlink()

    def _result(self, patience_s: float) -> Package:
        self._process.join(patience_s)
        code = self._process.exitcode
        version = installed(self.known.name)
        if code == 0:
            return Package(version=version or "of unknown version")
        if code is None:
            self._process.kill()
            return Package(version=version, error=f"importing it takes more than {patience_s:.0f} s")
        text = self._said.read_text(encoding="utf-8", errors="replace")
        lines = text.strip().splitlines()
        ended = (
            f"importing it ends the interpreter by signal {-code}" if code < 0 else f"importing it exits with {code}"
        )
        said = lines[-1] if lines and code > 0 else ended
        broken, own = broken_package(text), self.known.module.partition(".")[0]
        cure = cure_of_broken(broken) if broken and broken != own else ""
        return Package(version=version, error=said, cure=cure)


def _import(module: str, said: str) -> None:
    file = open(said, "w", buffering=1, encoding="utf-8")  # noqa: SIM115  (the traceback goes there too)
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    sys.stdout = sys.stderr = file
    faulthandler.disable()
    importlib.import_module(module)


def _unlinked(count: int) -> list[tuple[int, int]]:
    pairs = [(a, b) for a in range(count) for b in range(count) if a < b]
    return [(a, b) for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
