"""What NVML says of a GPU: once, or beside training.

NVML belongs to the package ``nvidia-ml-py``, which torch does not require; torch's own ``torch.cuda.utilization`` and
its kin ask it as well.
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

_SLOWED = {  # NVML's bits; the others mean idle, or that the user asked for it
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
    """Return what NVML says of each visible GPU: power limit, clocks, what slows it, NVLinks. None without NVML."""
    if (nvml := _nvml()) is None:
        return None
    return [{"index": index, **_read(nvml, _handle(nvml, index), _ONCE)} for index in range(torch.cuda.device_count())]


def sensor(device: torch.device) -> Sensor | None:
    """Return what reads the state of the GPU ``device`` at work, or None without NVML."""
    if (nvml := _nvml()) is None or (gpu := _handle(nvml, device.index)) is None:
        return None
    return lambda: _read(nvml, gpu, _AT_WORK)


def _nvml() -> Any:
    """Return NVML, begun, or None if it is missing or there is no driver that fits."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an older package of the same module name says that it is deprecated
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
    nvml.nvmlInit()  # once in a process: each time would have to be ended


def _handle(nvml: Any, index: int | None) -> Any:
    uuid = str(getattr(torch.cuda.get_device_properties(index), "uuid", ""))
    with suppress(nvml.NVMLError):
        # By its identity: NVML counts the machine's GPUs, torch the visible ones.
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
    """Of some readings: each value's sum and number, since a reading may lack one."""

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
    """Reads a sensor again and again in a thread of its own, and keeps sums.

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
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End; what was read stays."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def forget(self) -> None:
        """Begin the sums anew, such as after a warm-up."""
        with self._lock:
            self._sums = _Sums()

    @property
    def latest(self) -> Mapping[str, Any]:
        """The last reading."""
        return self._latest

    def summary(self) -> dict[str, Any]:
        """Return the means, and what slowed the GPU in at least one reading of ten."""
        with self._lock:
            return self._sums.means()

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            reading = self._latest = self._read()
            with self._lock:
                self._sums.add(reading)
