"""What is known to go wrong on a machine set up like this one: a row for each, as ``doctor`` warns of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from packaging.version import Version

from lightning_ups._compat.environment import installed
from lightning_ups._compat.torch.versions import UNTESTED
from lightning_ups.commands.machine.packages import Machine

__all__ = ["HAZARDS", "Advice", "Hazard", "warnings_for"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """What was found, why it matters, and what to do."""

    what: str
    why: str
    cure: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Hazard:
    """One row: ``found`` returns what there is to say of a machine, or None."""

    found: Callable[[Machine], str | None]
    why: str
    cure: str


def warnings_for(machine: Machine) -> list[Advice]:
    """Return every warning that holds for ``machine``."""
    said = ((hazard, hazard.found(machine)) for hazard in HAZARDS)
    return [Advice(what=what, why=hazard.why, cure=hazard.cure) for hazard, what in said if what is not None]


_MALICIOUS = ("2.6.2", "2.6.3")
_TUNED = (
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_P2P_DISABLE",
    "NCCL_SHM_DISABLE",
    "NCCL_IB_DISABLE",
    "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_NCHANNELS",
    "NCCL_NSOCKS_PERTHREAD",
    "NCCL_SOCKET_NTHREADS",
    "NCCL_BUFFSIZE",
)
_SLOWING = ("CUDA_LAUNCH_BLOCKING", "PYTORCH_NO_CUDA_MEMORY_CACHING", "TORCH_DISTRIBUTED_DEBUG")
_NOT_COMPILING = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")
_NO_SUCH = ("TORCH_INDUCTOR_DISABLE_CUDAGRAPHS", "TORCH_CUDNN_BENCHMARK", "PYTORCH_CUDA_ALLOCATOR_CONF")
_GIB = 1 << 30
_OFF = ("", "0", "OFF", "FALSE", "INFO")


def _malicious(_: Machine) -> str | None:
    versions = {name: installed(name) for name in ("lightning", "pytorch-lightning")}
    found = [f"{name} {version}" for name, version in versions.items() if version in _MALICIOUS]
    return f"{' and '.join(found)} is installed." if found else None


def _untested_torch(machine: Machine) -> str | None:
    found = Version(machine.packages["torch"].version or "0")
    return f"torch {found} is newer than any that lightning_ups was tested with." if found.release >= UNTESTED else None


def _set(*names: str, unless: Sequence[str] = ()) -> Callable[[Machine], str | None]:
    def found(machine: Machine) -> str | None:
        present = {name: machine.environment[name] for name in names if name in machine.environment}
        listed = [f"{name}={value}" for name, value in present.items() if value.upper() not in unless]
        return f"{', '.join(listed)} is set." if listed else None

    return found


def _cpu_build(machine: Machine) -> str | None:
    if machine.has_nvidia and machine.cuda is None:
        return f"This machine has an NVIDIA GPU, and torch {machine.packages['torch'].version} is a CPU build."
    return None


def _unseen(machine: Machine) -> str | None:
    if machine.has_nvidia and machine.cuda is not None and not machine.gpus:
        return f"This machine has an NVIDIA GPU, and torch, built for CUDA {machine.cuda}, sees none."
    return None


def _too_many_threads(machine: Machine) -> str | None:
    cores = machine.host["usable_cores"]
    if machine.threads > cores:
        return f"torch uses {machine.threads} threads on {cores} usable cores."
    return None


def _small_shared_memory(machine: Machine) -> str | None:
    size = machine.host["shared_memory"]
    if size is not None and size < _GIB:
        return f"/dev/shm has {size >> 20} MiB."
    return None


def _slowed(machine: Machine) -> str | None:
    # At rest a GPU meets no power limit: what is left is heat and hardware.
    slowed = {gpu["index"]: gpu["slowed_by"] for gpu in machine.gpus if set(gpu.get("slowed_by", ())) - {"power limit"}}
    return ", ".join(f"GPU {i} is slowed: {' and '.join(reasons)}" for i, reasons in slowed.items()) or None


def _mixed_gpus(machine: Machine) -> str | None:
    names = dict.fromkeys(gpu["name"] for gpu in machine.gpus)
    return f"GPUs of different kinds are visible: {', '.join(names)}." if len(names) > 1 else None


def _two_allocator_settings(machine: Machine) -> str | None:
    values = [machine.environment.get(name) for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")]
    if None not in values and values[0] != values[1]:
        return f"PYTORCH_ALLOC_CONF={values[0]} and PYTORCH_CUDA_ALLOC_CONF={values[1]} are both set."
    return None


HAZARDS: tuple[Hazard, ...] = (
    Hazard(
        found=_malicious,
        why="Its wheels of 2026-04-30 were uploaded by an attacker and steal credentials (GHSA-w37p-236h-pfx3).",
        cure="Remove it, change every secret that this machine had, and run: pip install 'lightning>=2.6.6,<2.7'.",
    ),
    Hazard(
        found=_untested_torch,
        why="A part that depends on private names of torch may be refused, left out or fail.",
        cure=f"Update lightning_ups, or run: pip install 'torch<{UNTESTED[0]}.{UNTESTED[1]}'.",
    ),
    Hazard(
        found=_cpu_build,
        why="Everything would run on the CPU.",
        cure="Install a build of torch for CUDA, as pytorch.org/get-started says for this driver.",
    ),
    Hazard(
        found=_unseen,
        why="The driver may be too old for that CUDA, or CUDA_VISIBLE_DEVICES hides the GPU.",
        cure="Run nvidia-smi, compare its CUDA version, and unset CUDA_VISIBLE_DEVICES.",
    ),
    Hazard(
        found=_set(*_TUNED),
        why="NCCL chooses by the topology it finds; a fixed choice was mostly made for another machine.",
        cure="Unset it, unless a measurement on this machine says otherwise.",
    ),
    Hazard(
        found=_set(*_SLOWING, unless=_OFF),
        why="It makes work wait that otherwise overlaps: for debugging only.",
        cure="Unset it.",
    ),
    Hazard(
        found=_set(*_NOT_COMPILING, unless=_OFF),
        why="torch.compile then does nothing, in silence.",
        cure="Unset it.",
    ),
    Hazard(
        found=_set(*_NO_SUCH),
        why="torch has no variable of that name, so it has no effect.",
        cure="Look for the right name, or use the setting of the trainer or of a callback.",
    ),
    Hazard(
        found=_two_allocator_settings,
        why="They say different things, and which of them counts depends on the version of torch.",
        cure="Keep one of them.",
    ),
    Hazard(
        found=_too_many_threads,
        why="They take turns, which is slower than fewer threads; a container's quota is not seen by OpenMP.",
        cure="Set OMP_NUM_THREADS to the usable cores divided by the processes that run at once.",
    ),
    Hazard(
        found=_small_shared_memory,
        why="DataLoader workers and NCCL pass data through it; when it is full, they die with 'Bus error'.",
        cure="Start the container with --shm-size=16g or --ipc=host, or use num_workers=0.",
    ),
    Hazard(
        found=_slowed,
        why="Its clock is below what it could be, so that measurements mislead.",
        cure="Look at cooling and power: nvidia-smi -q -d PERFORMANCE.",
    ),
    Hazard(
        found=_mixed_gpus,
        why="A step is as slow as the slowest, and memory is that of the smallest.",
        cure="Choose equal ones by CUDA_VISIBLE_DEVICES.",
    ),
)
