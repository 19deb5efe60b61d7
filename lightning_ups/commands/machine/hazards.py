"""What is known to go wrong on a machine set up like this one, as ``doctor`` warns of it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from packaging.version import Version

from lightning_ups._compat.environment import installed
from lightning_ups._compat.torch.versions import UNTESTED
from lightning_ups.commands.machine.packages import Machine

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """What was found, why it matters, and what to do."""

    what: str
    why: str
    cure: str


def warnings_for(machine: Machine) -> list[Advice]:
    """Return every warning that holds for ``machine``."""
    return [*_of_packages(machine), *_of_variables(machine.environment), *_of_hardware(machine)]


def _of_packages(machine: Machine) -> Iterator[Advice]:
    versions = {name: installed(name) for name in ("lightning", "pytorch-lightning")}
    if found := [f"{name} {version}" for name, version in versions.items() if version in _MALICIOUS]:
        yield Advice(
            what=f"{' and '.join(found)} is installed.",
            why="Its wheels of 2026-04-30 were uploaded by an attacker and steal credentials (GHSA-w37p-236h-pfx3).",
            cure="Remove it, change every secret that this machine had, and run: pip install 'lightning>=2.6.6,<2.7'.",
        )
    torch = machine.packages["torch"].version
    if Version(torch or "0").release >= UNTESTED:
        yield Advice(
            what=f"torch {torch} is newer than any that lightning_ups was tested with.",
            why="A part that depends on private names of torch may be refused, left out or fail.",
            cure=f"Update lightning_ups, or run: pip install 'torch<{UNTESTED[0]}.{UNTESTED[1]}'.",
        )
    if machine.has_nvidia and machine.cuda is None:
        yield Advice(
            what=f"This machine has an NVIDIA GPU, and torch {torch} is a CPU build.",
            why="Everything would run on the CPU.",
            cure="Install a build of torch for CUDA, as pytorch.org/get-started says for this driver.",
        )
    elif machine.has_nvidia and not machine.gpus:
        yield Advice(
            what=f"This machine has an NVIDIA GPU, and torch, built for CUDA {machine.cuda}, sees none.",
            why="The driver may be too old for that CUDA, or CUDA_VISIBLE_DEVICES hides the GPU.",
            cure="Run nvidia-smi, compare its CUDA version, and unset CUDA_VISIBLE_DEVICES.",
        )


def _of_variables(environment: Mapping[str, str]) -> Iterator[Advice]:
    yield from _set(
        {name: environment.get(name) for name in _TUNED},
        why="NCCL chooses by the topology it finds; a fixed choice was mostly made for another machine.",
        cure="Unset it, unless a measurement on this machine says otherwise.",
    )
    on = {name: value for name, value in environment.items() if value.upper() not in _OFF}
    debugs, eager = ({name: on.get(name) for name in names} for names in (_SLOWING, _NOT_COMPILING))
    yield from _set(debugs, why="It makes work wait that otherwise overlaps: for debugging only.", cure="Unset it.")
    yield from _set(eager, why="torch.compile then does nothing, in silence.", cure="Unset it.")
    yield from _set(
        {name: environment.get(name) for name in _NO_SUCH},
        why="torch has no variable of that name, so it has no effect.",
        cure="Look for the right name, or use the setting of the trainer or of a callback.",
    )


def _set(variables: Mapping[str, str | None], *, why: str, cure: str) -> Iterator[Advice]:
    if found := [f"{name}={value}" for name, value in variables.items() if value is not None]:
        yield Advice(what=f"{', '.join(found)} is set.", why=why, cure=cure)


def _of_hardware(machine: Machine) -> Iterator[Advice]:
    cores, shared = machine.host["usable_cores"], machine.host["shared_memory"]
    if machine.threads > cores:
        yield Advice(
            what=f"torch uses {machine.threads} threads on {cores} usable cores.",
            why="They take turns, which is slower than fewer threads; a container's quota is not seen by OpenMP.",
            cure="Set OMP_NUM_THREADS to the usable cores divided by the processes that run at once.",
        )
    if shared is not None and shared < _GIB:
        yield Advice(
            what=f"/dev/shm has {shared >> 20} MiB.",
            why="DataLoader workers and NCCL pass data through it; when it is full, they die with 'Bus error'.",
            cure="Start the container with --shm-size=16g or --ipc=host, or use num_workers=0.",
        )
    # At rest a GPU meets no power limit: what is left is heat and hardware.
    slowed = {gpu["index"]: gpu["slowed_by"] for gpu in machine.gpus if set(gpu.get("slowed_by", ())) - {"power limit"}}
    if slowed:
        yield Advice(
            what=", ".join(f"GPU {i} is slowed: {' and '.join(reasons)}" for i, reasons in slowed.items()),
            why="Its clock is below what it could be, so that measurements mislead.",
            cure="Look at cooling and power: nvidia-smi -q -d PERFORMANCE.",
        )
    if len(names := dict.fromkeys(gpu["name"] for gpu in machine.gpus)) > 1:
        yield Advice(
            what=f"GPUs of different kinds are visible: {', '.join(names)}.",
            why="A step is as slow as the slowest, and memory is that of the smallest.",
            cure="Choose equal ones by CUDA_VISIBLE_DEVICES.",
        )
