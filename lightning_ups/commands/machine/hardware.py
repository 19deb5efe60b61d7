"""What torch and its companions can do on a machine: the table behind ``doctor``, a row for each technique.

A row says what a technique needs; where all of it is there, a probe runs the thing itself. Rows speak of torch, the
hardware and packages, not of parts of this suite. A new part appends a row.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

from lightning_ups._compat.torch import probes
from lightning_ups.commands.machine.packages import KNOWN, Machine
from lightning_ups.transforms.flags import AttentionBackend, attention_kernel_error
from lightning_ups.transforms.float8 import RECIPES
from lightning_ups.transforms.quoted import first_line

Verdict = Literal["runs", "limited", "no"]
Capability = tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Whether something runs here, why, and what would change it; ``limited`` runs, at a price."""

    verdict: Verdict
    why: str = ""
    cure: str = ""


Check = Callable[[Machine], "Finding | None"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Technique:
    """One row."""

    name: str  # what ``--require`` takes
    title: str
    group: str  # the section it is shown in
    gpus: int = 0  # with fewer it does not run
    capability: Capability = (0, 0)  # the least of each GPU
    below: Capability | None = None  # the capability from which on it no longer runs
    packages: Sequence[str] = ()  # distributions that must be there and load
    check: Check = lambda _: None  # a probe that raises, or returns what it found; runs where all the above holds


def examine(technique: Technique, machine: Machine) -> Finding:
    """Return whether ``technique`` runs on ``machine``."""
    lacks = _lacks_hardware(technique, machine) or _lacks_package(technique, machine)
    if lacks is not None:
        return lacks
    try:
        return technique.check(machine) or Finding(verdict="runs")
    except (RuntimeError, ValueError, TypeError, ImportError, AttributeError, AssertionError, OSError) as error:
        return Finding(
            verdict="no", why=f"tried, and it failed: {first_line(error)}", cure=_CURES.get(technique.name, "")
        )


def _lacks_hardware(technique: Technique, machine: Machine) -> Finding | None:
    if technique.gpus and machine.capability is None:
        return Finding(verdict="no", why=f"needs {_gpus(technique.gpus)}", cure=_cure_for_no_gpu(machine))
    if machine.capability is None or not technique.gpus:
        return None
    if len(machine.gpus) < technique.gpus:
        return Finding(verdict="no", why=f"needs {_gpus(technique.gpus)}, and {len(machine.gpus)} is visible")
    have = machine.capability
    if have < technique.capability or (technique.below is not None and have >= technique.below):
        limit = f"at least {_dotted(technique.capability)}"
        if technique.below is not None:
            limit += f" and below {_dotted(technique.below)}"
        return Finding(verdict="no", why=f"needs compute capability {limit}; this GPU has {_dotted(have)}")
    return None


def _lacks_package(technique: Technique, machine: Machine) -> Finding | None:
    for name in technique.packages:
        package = machine.packages.get(name)
        if package is None or package.version is None:
            return Finding(verdict="no", why=f"{name} is not installed", cure=_CURE_OF_PACKAGE[name])
        if not package.loads:
            anew = f"reinstall it for torch {machine.packages['torch'].version}: {_CURE_OF_PACKAGE[name]}"
            cure = package.cure or anew
            return Finding(verdict="no", why=f"{name} {package.version} does not load: {package.error}", cure=cure)
    return None


def _cure_for_no_gpu(machine: Machine) -> str:
    if machine.has_nvidia and machine.cuda is None:
        return "this torch is a CPU build: install one for CUDA"
    unseen = "torch sees none of this machine's: look at the driver and CUDA_VISIBLE_DEVICES"
    return unseen if machine.has_nvidia else ""


def _gpus(count: int) -> str:
    return "a GPU" if count == 1 else f"{count} GPUs"


def _dotted(capability: Capability) -> str:
    return f"{capability[0]}.{capability[1]}"


_CURE_OF_PACKAGE = {known.name: known.cure for known in KNOWN}
_COMPILER = "install a C++ compiler and Python's headers: apt install g++ python3-dev"
_CURES = {"compile-cpu": _COMPILER, "compile-gpu": _COMPILER, "flex-attention": _COMPILER}


# Checks that are more than a probe


@cache
def _compile_cpp_once() -> None:
    probes.compile_cpp()  # three rows build on it; what it raises is not kept


def _flex_attention(machine: Machine) -> Finding | None:
    importlib.import_module("torch.nn.attention.flex_attention")
    if machine.gpus:
        return examine(_BY_NAME["compile-gpu"], machine)
    compiler = examine(_BY_NAME["compile-cpu"], machine)
    if compiler.verdict == "no":
        return compiler
    return Finding(verdict="limited", why="a CPU has the forward only: no training")


def _bfloat16(machine: Machine) -> Finding | None:
    probes.bfloat16_matmul(machine.device)
    if machine.capability is None:
        if not probes.cpu_computes_bfloat16():
            return Finding(
                verdict="limited", why="this processor computes in float32 and converts: slower than float32"
            )
    elif machine.capability < (8, 0):
        return Finding(verdict="limited", why=f"GPUs of capability {_dotted(machine.capability)} emulate it: slow")
    return None


def _probed(probe: Callable[[torch.device], None]) -> Check:
    return lambda machine: probe(machine.device)


def _attention(name: AttentionBackend) -> Check:
    def check(machine: Machine) -> Finding | None:
        if error := attention_kernel_error(name, device=machine.device):
            return Finding(verdict="no", why=error)
        if not machine.gpus:
            return Finding(verdict="limited", why="torch's own kernel for CPUs, of the same algorithm")
        return None

    return check


def _fsdp2(machine: Machine) -> Finding | None:
    if not torch.distributed.is_available():
        return Finding(verdict="no", why="this torch is built without torch.distributed")
    if not machine.gpus:
        return Finding(verdict="limited", why="CPU processes over gloo: correct, and fast enough for tests only")
    if len(machine.gpus) == 1:
        return Finding(verdict="limited", why="1 GPU is visible: there is nothing to shard over")
    return None


def _simple_fsdp(machine: Machine) -> Finding | None:
    compiler = examine(_BY_NAME["compile-gpu" if machine.gpus else "compile-cpu"], machine)
    if compiler.verdict == "no":
        return Finding(verdict="no", why=f"needs torch.compile: {compiler.why}", cure=compiler.cure)
    return _fsdp2(machine)


def _nccl(machine: Machine) -> Finding | None:
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return Finding(verdict="no", why="this torch is built without NCCL", cure="install a build of torch for CUDA")
    if machine.unlinked:
        pairs = ", ".join(f"{a}-{b}" for a, b in machine.unlinked[:4])
        return Finding(verdict="limited", why=f"GPUs {pairs} reach each other through the host only")
    return None


TECHNIQUES: tuple[Technique, ...] = (
    Technique(
        name="compile-cpu",
        title="torch.compile on the CPU (Inductor, C++)",
        group="compilation",
        check=lambda _: _compile_cpp_once(),
    ),
    Technique(
        name="compile-gpu",
        title="torch.compile on a GPU (Inductor, Triton)",
        group="compilation",
        gpus=1,
        capability=(7, 0),
        packages=["triton"],
        check=lambda machine: probes.triton_kernel(machine.device),
    ),
    Technique(
        name="cuda-graphs",
        title="CUDA graphs (mode reduce-overhead)",
        group="compilation",
        gpus=1,
        check=lambda machine: probes.cuda_graph(machine.device),
    ),
    Technique(name="bf16", title="bfloat16", group="precision", check=_bfloat16),
    Technique(name="tf32", title="TF32", group="precision", gpus=1, capability=(8, 0)),
    *(
        Technique(
            name=recipe.technique,
            title=f"float8, recipe {recipe.name} (torchao)",
            group="precision",
            gpus=1,
            capability=recipe.capability,
            packages=["torchao"],
            check=_probed(recipe.probe),
        )
        for recipe in RECIPES.values()
        if recipe.technique is not None and recipe.probe is not None
    ),
    Technique(
        name="te-fp8",
        title="FP8 (Transformer Engine)",
        group="precision",
        gpus=1,
        capability=(8, 9),
        packages=["transformer-engine"],
    ),
    Technique(
        name="flash-attention-2", title="FlashAttention-2 in torch", group="attention", check=_attention("flash")
    ),
    Technique(
        name="cudnn-attention",
        title="cuDNN attention in torch",
        group="attention",
        gpus=1,
        capability=(8, 0),
        check=_attention("cudnn"),
    ),
    Technique(
        name="flash-attention-3",
        title="FlashAttention-3",
        group="attention",
        gpus=1,
        capability=(9, 0),
        below=(10, 0),
        packages=["flash-attn-3"],
    ),
    Technique(
        name="flash-attention-4",
        title="FlashAttention-4 (CuTe)",
        group="attention",
        gpus=1,
        capability=(9, 0),
        packages=["flash-attn-4"],
    ),
    Technique(name="flex-attention", title="FlexAttention", group="attention", check=_flex_attention),
    Technique(name="fsdp2", title="FSDP2 (fully_shard)", group="several devices", check=_fsdp2),
    Technique(name="simple-fsdp", title="SimpleFSDP (DTensor, compiled)", group="several devices", check=_simple_fsdp),
    Technique(name="nccl", title="NCCL", group="several devices", gpus=1, check=_nccl),
    Technique(
        name="optimizer-offload",
        title="optimizer state in host memory",
        group="memory",
        gpus=1,
        check=lambda machine: probes.pinned_copy(machine.device),
    ),
)
_BY_NAME = {technique.name: technique for technique in TECHNIQUES}
