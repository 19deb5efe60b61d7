import math
import time

import pytest
import torch

from lightning_ups.insight import late_values
from lightning_ups.insight.late_values import LateValues, comes_late
from tests.late_device import LateDevice

VALUES = {
    "half": torch.tensor(0.1, dtype=torch.bfloat16),
    "bool": torch.tensor([True]),
    "double": torch.tensor(0.1, dtype=torch.float64),
    "count": torch.tensor(2**53 + 1),
    "nan": torch.tensor(math.nan),
    "single": torch.tensor([[0.1]]),
    "part": torch.arange(9.0)[3],
    "strided": torch.arange(40.0).reshape(4, 10)[:1, 3],
    "strided twice": torch.arange(40.0).reshape(4, 10)[2:3, 7:8],
    "kept": torch.tensor(1.5, requires_grad=True),
}


@pytest.fixture
def device(monkeypatch):
    device = LateDevice(lag=1)
    monkeypatch.setattr(late_values, "_mark", device.mark)
    return device


def test_each_number_is_what_item_says_in_its_place(device):
    device.batch = 1
    found = LateValues(VALUES).read()
    assert [*found] == [*VALUES]
    for name, value in VALUES.items():
        assert type(found[name]) is type(value.item())
        assert found[name] == value.item() or name == "nan"
    assert math.isnan(found["nan"])
    assert device.marks == 1, "they travel together"
    assert LateValues({}).read() == {}


def test_later_writes_do_not_change_the_values(device):
    value = torch.tensor(1.0)
    late = LateValues({"a": value})
    value.add_(1)
    assert late.read() == {"a": 1.0}


def test_looking_does_not_wait_and_reading_does(device):
    late = LateValues({"a": torch.tensor(1.0)})
    assert not late.arrived()
    assert device.waits == []
    late.read()
    assert device.waits == [0]
    later = LateValues({"a": torch.tensor(1.0)})
    device.batch = 1
    assert later.arrived()


def test_reading_may_time_out(device):
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"0\.05 s"):
        LateValues({"a": torch.tensor(1.0)}).read(patience_s=0.05)
    assert time.monotonic() - began >= 0.05
    assert device.waits == []


def test_only_single_numbers_of_a_gpu_come_late(monkeypatch):
    assert not comes_late(torch.tensor(1.0))
    monkeypatch.setattr(late_values, "is_far", lambda device: True)
    assert comes_late(torch.tensor([1.0]))
    for other in (1.0, torch.ones(2), torch.nn.Parameter(torch.tensor(1.0)), torch.tensor(1j).conj().imag):
        assert not comes_late(other)


@pytest.mark.gpu
def test_the_host_does_not_wait_for_a_gpu():
    far = {name: value.detach().cuda() for name, value in VALUES.items()}
    a = torch.randn(4096, 4096, device="cuda")
    LateValues(far).read()  # the first copy allocates pinned memory
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(50):
            a = (a @ a).clamp(-1, 1)
        last = a.sum()
        late = LateValues({**far, "last": last})
        assert not late.arrived()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found = late.read()
    assert late.arrived()
    assert found.pop("last") == last.item()
    assert {name: value for name, value in found.items() if name != "nan"} == {
        name: value.item() for name, value in far.items() if name != "nan"
    }
