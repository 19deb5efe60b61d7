"""What NVML says of a GPU while it works, read beside training.

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

from lightning_ups._compat.environment import slowed_by

__all__ = ["Sampler", "Sensor", "sensor"]

Sensor = Callable[[], "Mapping[str, Any]"]  # utilisation (share), power_w, clock_mhz, temperature_c, slowed_by


def sensor(device: torch.device) -> Sensor | None:
    """Return what reads the state of the GPU ``device``, or None without NVML."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an older package of the same module name says that it is deprecated
            nvml: Any = importlib.import_module("pynvml")
        _begin(nvml)
    except (ImportError, OSError):
        return None
    except Exception as error:
        if type(error).__name__.startswith("NVMLError"):
            return None
        raise
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    try:
        # By its identity: NVML counts the machine's GPUs, torch the visible ones.
        handle = (
            nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}") if uuid else nvml.nvmlDeviceGetHandleByIndex(device.index)
        )
    except nvml.NVMLError:
        return None
    values: dict[str, Callable[[], Any]] = {
        "utilisation": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
        "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        "clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
        "max_clock_mhz": lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
        "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        "slowed_by": lambda: slowed_by(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
    }

    def read() -> dict[str, Any]:
        found = {}
        for name, value in values.items():
            with suppress(nvml.NVMLError, AttributeError):  # names change between versions
                found[name] = value()
        return found

    return read


@functools.cache
def _begin(nvml: Any) -> None:
    nvml.nvmlInit()  # once in a process: each time would have to be ended


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
