import sys
import time
import types

import pytest
import torch

from lightning_ups._compat.environment import versions
from lightning_ups._compat.optional.nvml import Sampler, _Sums, gpu_states, sensor


class NVMLError(Exception):
    pass


@pytest.fixture
def nvml(monkeypatch):
    """NVML with two GPUs, of which torch sees the second."""
    module = types.ModuleType("pynvml")
    module.NVMLError = NVMLError
    module.NVML_CLOCK_SM, module.NVML_TEMPERATURE_GPU = 1, 0
    module.nvmlInit = lambda: None
    module.nvmlDeviceGetHandleByUUID = lambda uuid: {"GPU-b": "second"}[uuid]
    module.nvmlDeviceGetUtilizationRates = lambda handle: types.SimpleNamespace(gpu=87)
    module.nvmlDeviceGetPowerUsage = lambda handle: 650_000
    module.nvmlDeviceGetClockInfo = lambda handle, kind: 1500
    module.nvmlDeviceGetMaxClockInfo = lambda handle, kind: 1980
    module.nvmlDeviceGetCurrentClocksThrottleReasons = lambda handle: 0x24
    module.nvmlDeviceGetTemperature = failing
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(uuid="b"))
    return module


def failing(*_):
    raise NVMLError("not supported")


def test_what_nvml_knows_is_read_and_the_rest_left_out(nvml):
    assert sensor(torch.device("cuda:0"))() == {
        "utilisation": 0.87,
        "power_w": 650.0,
        "clock_mhz": 1500,
        "max_clock_mhz": 1980,
        "slowed_by": ["power limit", "too hot"],
    }


def test_without_nvml_there_is_no_sensor(nvml, monkeypatch):
    monkeypatch.setattr(nvml, "nvmlDeviceGetHandleByUUID", failing)
    assert sensor(torch.device("cuda:0")) is None
    monkeypatch.setattr(nvml, "nvmlInit", failing)
    assert sensor(torch.device("cuda:0")) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert sensor(torch.device("cuda:0")) is None


def test_nvml_is_begun_once_however_many_runs_there_are(nvml, monkeypatch):
    begun = []
    monkeypatch.setattr(nvml, "nvmlInit", lambda: begun.append(1))
    for _ in range(3):
        assert sensor(torch.device("cuda:0")) is not None
    assert len(begun) == 1


def test_a_value_that_is_missing_now_and_then_is_averaged_over_the_others():
    sums = _Sums()
    for reading in ({"power_w": 100.0, "clock_mhz": 1000}, {"clock_mhz": 2000}, {}):
        sums.add(reading)
    assert sums.means() == {"power_w": 100.0, "clock_mhz": 1500, "slowed_by": []}
    assert _Sums().means() == {}


def sampled(read, *, readings=10):
    sampler = Sampler(read, every_s=0.001)
    sampler.start()
    until = time.monotonic() + 20
    while len(read.seen) < readings and time.monotonic() < until:
        time.sleep(0.002)
    sampler.stop()
    return sampler


class Read:
    def __init__(self, *, hot=0):
        self.seen, self.hot = [], hot

    def __call__(self):
        self.seen.append(len(self.seen))
        return {
            "power_w": 100.0 + 2 * (len(self.seen) % 2),
            "slowed_by": ["too hot"] if len(self.seen) <= self.hot else [],
        }


def test_readings_are_averaged():
    summary = sampled(Read()).summary()
    assert 100 < summary["power_w"] < 102
    assert summary["slowed_by"] == []


def test_what_slows_for_a_while_is_told_and_a_moment_is_not():
    assert sampled(Read(hot=10_000)).summary()["slowed_by"] == ["too hot"]
    assert sampled(Read(hot=1), readings=30).summary()["slowed_by"] == []


def test_sums_may_begin_anew():
    sampler = sampled(Read())
    assert sampler.latest["power_w"] in (100.0, 102.0)
    sampler.forget()
    assert sampler.summary() == {}


def test_a_sampler_that_never_began_may_be_stopped():
    Sampler(Read()).stop()


class Error(Exception):
    pass


def two_gpus(**answers):
    """A pynvml that knows two GPUs by their identity."""
    module = types.ModuleType("pynvml")
    module.NVMLError = Error
    module.NVML_CLOCK_SM, module.NVML_TEMPERATURE_GPU, module.NVML_NVLINK_MAX_LINKS = 1, 0, 18

    def unsupported(*_):
        raise Error

    def link(handle, number):
        return 1 if number < 4 else unsupported()

    module.nvmlInit = module.nvmlShutdown = lambda: None
    module.nvmlSystemGetDriverVersion = lambda: "580.1"
    module.nvmlDeviceGetHandleByUUID = {"GPU-aa": "first", "GPU-bb": "second"}.__getitem__
    module.nvmlDeviceGetEnforcedPowerLimit = {"first": 700000, "second": 350000}.__getitem__
    module.nvmlDeviceGetClockInfo = lambda handle, kind: 1500
    module.nvmlDeviceGetMaxClockInfo = lambda handle, kind: 1980
    module.nvmlDeviceGetTemperature = unsupported
    module.nvmlDeviceGetCurrentClocksThrottleReasons = lambda handle: 0x24
    module.nvmlDeviceGetNvLinkState = link
    for name, answer in answers.items():
        setattr(module, name, answer)
    return module


def visible(monkeypatch, *uuids):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: types.SimpleNamespace(uuid=uuids[index]))


def test_a_gpu_is_found_by_its_identity_and_what_nvml_does_not_know_is_left_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", two_gpus())
    visible(monkeypatch, "bb")
    assert gpu_states() == [
        {
            "index": 0,
            "power_limit_w": 350.0,
            "clock_mhz": 1500,
            "max_clock_mhz": 1980,
            "slowed_by": ["power limit", "too hot"],
            "nvlinks": 4,
        }
    ]
    assert versions()["driver"] == "580.1"


def test_without_nvml_there_are_no_states(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu_states() is None
    assert "driver" not in versions()


def test_a_driver_that_does_not_answer_is_none(monkeypatch):
    def fail():
        raise Error

    monkeypatch.setitem(sys.modules, "pynvml", two_gpus(nvmlInit=fail))
    assert gpu_states() is None


@pytest.mark.gpu
def test_a_real_gpu_says_its_limits():
    states = gpu_states()
    if states is None:
        pytest.skip("nvidia-ml-py is not installed")
    assert states[0]["power_limit_w"] > 10
    assert states[0]["max_clock_mhz"] > 100
