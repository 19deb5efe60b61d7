"""The environment of a run: versions, processors, GPUs, environment variables, the working tree.

Nothing here changes a run: no random number is drawn, no package is imported that torch does not import, except NVML's,
and only ``gpus`` initializes CUDA.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.cuda.nccl

from lightning_ups._compat.optional.nvml import driver_version

# Distributions that affect the speed or the results of a run.
PACKAGES = (
    "torch",
    "lightning",
    "pytorch-lightning",
    "lightning-ups",
    "torchao",
    "transformer-engine",
    "flash-attn",
    "flash-attn-3",
    "flash-attn-4",
    "triton",
    "transformers",
    "safetensors",
    "tensorboard",
    "jsonargparse",
    "nvidia-ml-py",
    "numpy",
)


def versions() -> dict[str, str]:
    """Return the versions of Python, of relevant installed packages, and of what torch was built with."""
    found = {"python": platform.python_version()}
    found |= {package: number for package in PACKAGES if (number := installed(package))}
    found["torch"] = str(torch.__version__)  # the build, such as 2.11.0+cu130, which the metadata may leave out
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
        if cudnn := getattr(torch._C, "_cudnn", None):  # torch.backends.cudnn.version() would initialize CUDA
            found["cudnn"] = _dotted(cudnn.getVersionInt())
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    if driver := driver_version():
        found["driver"] = driver
    return found


def installed(package: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def host() -> dict[str, Any]:
    """Return the processor, the cores that this process may use, and the memory, in bytes (None on Windows)."""
    return {
        "name": platform.node(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count() or 1,
        "usable_cores": usable_cores(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None,
        "memory_limit": _number("/sys/fs/cgroup/memory.max"),
        "shared_memory": shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else None,
    }


def usable_cores() -> int:
    """Return the number of cores that this process can use: its CPU affinity, limited by a container's quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _read("/sys/fs/cgroup/cpu.max").split()
    if len(quota) == 2 and quota[0].isdecimal():
        return max(1, min(allowed, round(int(quota[0]) / int(quota[1]))))
    return allowed


def graphs_made() -> dict[str, int]:
    """Return how many graphs Dynamo has compiled in this process, and the number of graph breaks."""
    if "torch._dynamo" not in sys.modules:
        return {"graphs": 0, "graph_breaks": 0}
    counters = torch._dynamo.utils.counters
    return {
        "graphs": counters["stats"]["unique_graphs"],
        "graph_breaks": sum(counters["graph_break"].values()),
    }


def gpus() -> list[dict[str, Any]]:
    """Return torch's properties of each visible GPU, memory in bytes."""
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "index": index,
                "name": properties.name,
                "capability": [properties.major, properties.minor],
                "memory": properties.total_memory,
                "multiprocessors": properties.multi_processor_count,
            }
        )
    return found


_RELEVANT = re.compile(
    r"(PYTORCH|TORCH|NCCL_|TORCHINDUCTOR|TRITON_|CUDA_|CUBLAS|CUDNN_|NVTE_|GLOO_|OMP_|MKL_|KMP_|GOMP_|LIGHTNING|PL_|"
    r"UPS_|HF_HUB_OFFLINE$|TOKENIZERS_PARALLELISM$|RANK$|LOCAL_RANK$|WORLD_SIZE$|SLURM_(NNODES|NTASKS|JOB_ID)$)"
)
_SECRET = re.compile(
    r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|AUTH|USER_ID)$", re.IGNORECASE
)


def relevant_variables(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment variables that affect a run, without secrets."""
    environment = os.environ if environment is None else environment
    named = {name: value for name, value in environment.items() if _RELEVANT.match(name)}
    return without_secrets({name: named[name] for name in sorted(named)})


def without_secrets(values: Any) -> Any:
    """Return nested ``values`` with ``***`` for values whose name suggests a secret, and for passwords in URLs."""
    if isinstance(values, Mapping):
        return {key: "***" if _is_secret(key, of) else without_secrets(of) for key, of in values.items()}
    if isinstance(values, (list, tuple)):
        return [without_secrets(value) for value in values]
    return re.sub(r"(?<=://)[^/@\s]+@", "", values) if isinstance(values, str) else values


def _is_secret(key: Any, value: Any) -> bool:
    return isinstance(value, str) and bool(value) and _SECRET.search(str(key)) is not None


def working_tree(folder: Path | None = None) -> dict[str, Any] | None:
    """Return the commit of the git repository around ``folder``, and whether files differ from it; None outside one."""
    folder = folder or Path.cwd()
    if not (commit := _git(folder, "rev-parse", "HEAD")):
        return None
    # Only tracked files, and with a short timeout: a repository may hold millions of untracked ones.
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit.strip(), "dirty": None if changed is None else bool(changed.strip())}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=3,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def _processor() -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return found.group(1) if found else platform.processor() or sys.platform


def _dotted(cudnn: int) -> str:
    return f"{cudnn // 10000}.{cudnn % 10000 // 100}.{cudnn % 100}"


def _number(path: str) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdecimal() else None


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
