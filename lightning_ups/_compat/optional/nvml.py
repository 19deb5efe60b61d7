"""Reads GPU properties and sensors with NVML.

NVML is in the package ``nvidia-ml-py``, which torch does not require; ``torch.cuda.utilization`` and similar functions
need it, too.
"""

import functools
import importlib
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch

Sensor = Callable[[], "Mapping[str, Any]"]  # utilisation (share), power_w, clock_mhz, temperature_c, slowed_by

_SLOWED = {  # NVML's bits; the others mean idle, or a limit set by the user
    0x04: "power limit",
    0x08: "hardware slowdown",
    0x20: "too hot",
    0x40: "too hot (hardware)",
    0x80: "power brake",
}
_ALWAYS: dict[str, Callable[[Any, Any], Any]] = {
    "clock_mhz": lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
    "max_clock_mhz": lambda nvml, gpu: nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_SM),
    "temperature_c": lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
    "slowed_by": lambda nvml, gpu: _slowed_by(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)),
}
_ONCE = {
    "power_limit_w": lambda nvml, gpu: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000,
    **_ALWAYS,
    "nvlinks": lambda nvml, gpu: _nvlinks(nvml, gpu),
}
_AT_WORK = {
    "utilisation": lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
    "power_w": lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
    **_ALWAYS,
}


def driver_version() -> str | None:
    """Return the version of NVIDIA's driver, or None without NVML."""
    if (nvml := _nvml()) is None:
        return None
    number = nvml.nvmlSystemGetDriverVersion()
    return number.decode() if isinstance(number, bytes) else number


def gpu_states() -> list[dict[str, Any]] | None:
    """Return NVML's state of each visible GPU: power limit, clocks, throttling, NVLinks. None without NVML."""
    if (nvml := _nvml()) is None:
        return None
    return [{"index": index, **_read(nvml, _handle(nvml, index), _ONCE)} for index in range(torch.cuda.device_count())]


def sensor(device: torch.device) -> Sensor | None:
    """Return a function that reads the state of the GPU ``device``, or None without NVML."""
    if (nvml := _nvml()) is None or (gpu := _handle(nvml, device.index)) is None:
        return None
    return lambda: _read(nvml, gpu, _AT_WORK)


def _nvml() -> Any:
    """Return the initialized NVML, or None if it is missing or has no matching driver."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an older package with the same module name warns that it is deprecated
            nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        _begin(nvml)
    except (OSError, nvml.NVMLError):
        return None
    return nvml


@functools.cache
def _begin(nvml: Any) -> None:
    nvml.nvmlInit()  # once per process: each call would need a shutdown


def _handle(nvml: Any, index: int | None) -> Any:
    uuid = str(getattr(torch.cuda.get_device_properties(index), "uuid", ""))
    with suppress(nvml.NVMLError):
        # By UUID: NVML counts all GPUs of the machine, torch only visible ones.
        return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}") if uuid else nvml.nvmlDeviceGetHandleByIndex(index)
    return None


def _read(nvml: Any, gpu: Any, values: Mapping[str, Callable[[Any, Any], Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items() if gpu is not None else ():
        with suppress(nvml.NVMLError, AttributeError):  # names change between versions
            found[name] = value(nvml, gpu)
    return found


def _slowed_by(bits: int) -> list[str]:
    return [reason for bit, reason in _SLOWED.items() if bits & bit]


def _nvlinks(nvml: Any, gpu: Any) -> int:
    active = 0
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            active += nvml.nvmlDeviceGetNvLinkState(gpu, link)
        except nvml.NVMLError:
            break
    return active


class Sampler:
    """Reads a sensor repeatedly in a thread, and keeps sums.

    Args:
        read: The sensor.
        every_s: Seconds between two readings.
    """

    def __init__(self, read: Sensor, *, every_s: float = 1.0) -> None:
        self._read, self._every_s = read, every_s
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._latest: Mapping[str, Any] = {}
        self._thread = threading.Thread(target=self._run, name="nvml", daemon=True)
        self.forget()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread; the sums are kept."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def forget(self) -> None:
        """Reset the sums, for example after a warm-up."""
        with self._lock:
            self._count = 0
            self._totals: dict[str, list[float]] = {}  # the sum and the number of readings, which may lack some values
            self._slowed = Counter[str]()

    @property
    def latest(self) -> Mapping[str, Any]:
        """The last reading."""
        return self._latest

    def summary(self) -> dict[str, Any]:
        """Return the means, and the reasons for throttling in at least one reading of ten."""
        with self._lock:
            if not self._count:
                return {}
            means = {name: total / number for name, (total, number) in self._totals.items()}
            return {**means, "slowed_by": [why for why, count in self._slowed.items() if count >= 0.1 * self._count]}

    def add(self, reading: Mapping[str, Any]) -> None:
        """Add one reading."""
        with self._lock:
            self._count += 1
            self._slowed.update(reading.get("slowed_by", ()))
            for name, value in reading.items():
                if name != "slowed_by":
                    total = self._totals.setdefault(name, [0.0, 0])
                    total[0] += value
                    total[1] += 1

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            self._latest = self._read()
            self.add(self._latest)
