import sys
import time
import types

import pytest
import torch

from lightning_ups._compat.environment import versions
from lightning_ups._compat.optional.nvml import Sampler, gpu_states, sensor


class Error(Exception):
    pass


def failing(*_):
    raise Error


@pytest.fixture
def nvml(monkeypatch):
    """A pynvml that knows two GPUs by their identity, of which torch sees the second."""
    module = types.ModuleType("pynvml")
    module.NVMLError = Error
    module.NVML_CLOCK_SM, module.NVML_TEMPERATURE_GPU, module.NVML_NVLINK_MAX_LINKS = 1, 0, 18
    module.nvmlInit = lambda: None
    module.nvmlSystemGetDriverVersion = lambda: "580.1"
    module.nvmlDeviceGetHandleByUUID = {"GPU-aa": "first", "GPU-bb": "second"}.__getitem__
    module.nvmlDeviceGetEnforcedPowerLimit = {"first": 700000, "second": 350000}.__getitem__
    module.nvmlDeviceGetUtilizationRates = lambda handle: types.SimpleNamespace(gpu=87)
    module.nvmlDeviceGetPowerUsage = {"first": 0, "second": 650_000}.__getitem__
    module.nvmlDeviceGetClockInfo = lambda handle, kind: 1500
    module.nvmlDeviceGetMaxClockInfo = lambda handle, kind: 1980
    module.nvmlDeviceGetTemperature = failing
    module.nvmlDeviceGetCurrentClocksThrottleReasons = lambda handle: 0x24
    module.nvmlDeviceGetNvLinkState = lambda handle, number: 1 if number < 4 else failing()
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(uuid="bb"))
    return module


ALWAYS = {"clock_mhz": 1500, "max_clock_mhz": 1980, "slowed_by": ["power limit", "too hot"]}


def test_what_nvml_knows_is_read_and_the_rest_left_out(nvml):
    assert sensor(torch.device("cuda:0"))() == {"utilisation": 0.87, "power_w": 650.0, **ALWAYS}
    assert gpu_states() == [{"index": 0, "power_limit_w": 350.0, **ALWAYS, "nvlinks": 4}]
    assert versions()["driver"] == "580.1"


def test_without_nvml_there_is_no_sensor(nvml, monkeypatch):
    monkeypatch.setattr(nvml, "nvmlInit", failing)  # a driver that does not answer
    assert (sensor(torch.device("cuda:0")), gpu_states()) == (None, None)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert (sensor(torch.device("cuda:0")), gpu_states()) == (None, None)
    assert "driver" not in versions()


def test_a_gpu_that_nvml_does_not_find_has_no_sensor(nvml, monkeypatch):
    monkeypatch.setattr(nvml, "nvmlDeviceGetHandleByUUID", failing)
    assert sensor(torch.device("cuda:0")) is None


def test_nvml_is_begun_once_however_many_runs_there_are(nvml, monkeypatch):
    begun = []
    monkeypatch.setattr(nvml, "nvmlInit", lambda: begun.append(1))
    for _ in range(3):
        assert sensor(torch.device("cuda:0")) is not None
    assert len(begun) == 1


def test_a_value_that_is_missing_now_and_then_is_averaged_over_the_others():
    sampler = Sampler(dict)
    assert sampler.summary() == {}
    for reading in ({"power_w": 100.0, "clock_mhz": 1000}, {"clock_mhz": 2000}, {}):
        sampler.add(reading)
    assert sampler.summary() == {"power_w": 100.0, "clock_mhz": 1500, "slowed_by": []}


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


@pytest.mark.gpu
def test_a_real_gpu_says_its_limits():
    states = gpu_states()
    if states is None:
        pytest.skip("nvidia-ml-py is not installed")
    assert states[0]["power_limit_w"] > 10
    assert states[0]["max_clock_mhz"] > 100
