"""The memory of GPUs, and the part that a step may use."""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType

from lightning_ups.insight.memory.account import GIB


@dataclass(frozen=True, kw_only=True)
class Device:
    """A kind of GPU.

    Args:
        name: The product name.
        gib: The total memory that torch reports, in GiB.
        capability: The compute capability.
    """

    name: str
    gib: float
    capability: tuple[int, int]

    @property
    def workspace(self) -> int:
        """Bytes of the cuBLAS workspaces in torch's pool, one for forward's thread and one for backward's."""
        # torch's defaults, CUBLAS_WORKSPACE_CONFIG being unset: aten/src/ATen/cuda/CublasHandlePool.cpp
        one = 32 * 2**20 if self.capability == (9, 0) else 4096 * 1024 * 2 + 16 * 1024 * 8
        return 2 * one

    def usable(self, *, devices: int) -> int:
        """Return the size that torch's pool may reach: without 0.6 GiB of the driver, 0.9 GiB of NCCL, and 3 %."""
        return round((self.gib - 0.6 - (0.9 if devices > 1 else 0)) * 0.97 * GIB)


DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        "b300": Device(name="NVIDIA B300", gib=268.0, capability=(10, 3)),
        "b200": Device(name="NVIDIA B200", gib=178.4, capability=(10, 0)),
        "gb200": Device(name="NVIDIA GB200", gib=184.0, capability=(10, 0)),
        "h200": Device(name="NVIDIA H200", gib=139.8, capability=(9, 0)),
        "gh200-96": Device(name="NVIDIA GH200 96GB", gib=94.5, capability=(9, 0)),
        "gh200-144": Device(name="NVIDIA GH200 144GB", gib=139.8, capability=(9, 0)),
        "h20": Device(name="NVIDIA H20", gib=95.1, capability=(9, 0)),
        "h100-nvl": Device(name="NVIDIA H100 NVL", gib=93.1, capability=(9, 0)),
        "h100-80": Device(name="NVIDIA H100 80GB", gib=79.1, capability=(9, 0)),
        "h100-64": Device(name="NVIDIA H100 64GB", gib=63.4, capability=(9, 0)),
        "h800-80": Device(name="NVIDIA H800 80GB", gib=79.1, capability=(9, 0)),
        "a100-80": Device(name="NVIDIA A100 80GB", gib=79.1, capability=(8, 0)),
        "a100-40": Device(name="NVIDIA A100 40GB", gib=39.4, capability=(8, 0)),
        "a800-80": Device(name="NVIDIA A800 80GB", gib=79.1, capability=(8, 0)),
        "l40s": Device(name="NVIDIA L40S", gib=44.4, capability=(8, 9)),
        "l40": Device(name="NVIDIA L40", gib=44.4, capability=(8, 9)),
        "l4": Device(name="NVIDIA L4", gib=22.0, capability=(8, 9)),
        "a10g": Device(name="NVIDIA A10G", gib=22.0, capability=(8, 6)),
        "a10": Device(name="NVIDIA A10", gib=22.0, capability=(8, 6)),
        "a40": Device(name="NVIDIA A40", gib=44.4, capability=(8, 6)),
        "t4": Device(name="Tesla T4", gib=14.6, capability=(7, 5)),
        "v100-32": Device(name="Tesla V100 32GB", gib=31.7, capability=(7, 0)),
        "v100-16": Device(name="Tesla V100 16GB", gib=15.8, capability=(7, 0)),
        "rtx-pro-6000": Device(name="NVIDIA RTX PRO 6000 Blackwell", gib=94.9, capability=(12, 0)),
        "rtx-6000-ada": Device(name="NVIDIA RTX 6000 Ada Generation", gib=47.4, capability=(8, 9)),
        "rtx-a6000": Device(name="NVIDIA RTX A6000", gib=47.4, capability=(8, 6)),
        "rtx-5090": Device(name="NVIDIA GeForce RTX 5090", gib=31.4, capability=(12, 0)),
        "rtx-5080": Device(name="NVIDIA GeForce RTX 5080", gib=15.5, capability=(12, 0)),
        "rtx-5070-ti": Device(name="NVIDIA GeForce RTX 5070 Ti", gib=15.5, capability=(12, 0)),
        "rtx-4090": Device(name="NVIDIA GeForce RTX 4090", gib=23.5, capability=(8, 9)),
        "rtx-4080": Device(name="NVIDIA GeForce RTX 4080", gib=15.6, capability=(8, 9)),
        "rtx-4070": Device(name="NVIDIA GeForce RTX 4070", gib=11.6, capability=(8, 9)),
        "rtx-4060-ti-16": Device(name="NVIDIA GeForce RTX 4060 Ti 16GB", gib=15.6, capability=(8, 9)),
        "rtx-3090": Device(name="NVIDIA GeForce RTX 3090", gib=23.6, capability=(8, 6)),
        "rtx-3080": Device(name="NVIDIA GeForce RTX 3080", gib=9.7, capability=(8, 6)),
        "rtx-3060": Device(name="NVIDIA GeForce RTX 3060", gib=11.6, capability=(8, 6)),
    }
)


def device_of(name: str) -> Device:
    """Return the GPU called ``name``: a key of `DEVICES`, a name that torch reports, or a number of GiB.

    Raises:
        ValueError: If it is unknown.
    """
    if name.replace(".", "", 1).isdecimal():
        return Device(name=f"a GPU of {float(name):g} GiB", gib=float(name), capability=(9, 0))
    words = name.lower().removeprefix("nvidia ").removeprefix("geforce ").replace(" ", "-")
    if (known := DEVICES.get(words)) is not None:
        return known
    called = [device for device in DEVICES.values() if device.name.lower() == name.lower()]
    begins = [device for key, device in DEVICES.items() if key.startswith(f"{words}-")]
    if called or len(begins) == 1:
        return (called or begins)[0]
    near = [key for key in DEVICES if key.startswith(f"{words}-")] or get_close_matches(words, DEVICES, n=4, cutoff=0.4)
    raise ValueError(
        f"The GPU {name!r} is not in the table."
        f" Use one of {', '.join(near or DEVICES)}, or its memory in GiB, as in --gpu 24."
    )
