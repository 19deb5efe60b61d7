"""Reads GPU properties and sensors with NVML.

NVML is in the package ``nvidia-ml-py``, which torch does not require; ``torch.cuda.utilization`` and similar functions
need it, too.
"""

import functools
import importlib
import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch

__all__ = ["Sampler", "Sensor", "driver_version", "gpu_states", "sensor"]

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


class _Sums:
    """Sums and counts of readings, for each value, since a reading may lack some."""

    def __init__(self) -> None:
        self.totals: dict[str, tuple[float, int]] = {}
        self.slowed: dict[str, int] = {}
        self.count = 0

    def add(self, reading: Mapping[str, Any]) -> None:
        self.count += 1
        for name, value in reading.items():
            if name == "slowed_by":
                for reason in value:
                    self.slowed[reason] = self.slowed.get(reason, 0) + 1
            else:
                total, number = self.totals.get(name, (0.0, 0))
                self.totals[name] = (total + value, number + 1)

    def means(self) -> dict[str, Any]:
        if not self.count:
            return {}
        found: dict[str, Any] = {name: total / number for name, (total, number) in self.totals.items()}
        found["slowed_by"] = [reason for reason, count in self.slowed.items() if count >= 0.1 * self.count]
        return found


class Sampler:
    """Reads a sensor repeatedly in a thread, and keeps sums.

    Args:
        read: The sensor.
        every_s: Seconds between two readings.
    """

    def __init__(self, read: Sensor, *, every_s: float = 1.0) -> None:
        self._read, self._every_s = read, every_s
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._sums = _Sums()
        self._latest: Mapping[str, Any] = {}
        self._thread = threading.Thread(target=self._run, name="nvml", daemon=True)

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
            self._sums = _Sums()

    @property
    def latest(self) -> Mapping[str, Any]:
        """The last reading."""
        return self._latest

    def summary(self) -> dict[str, Any]:
        """Return the means, and the reasons for throttling in at least one reading of ten."""
        with self._lock:
            return self._sums.means()

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            reading = self._latest = self._read()
            with self._lock:
                self._sums.add(reading)
