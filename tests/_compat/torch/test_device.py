import warnings
from collections import Counter

import pytest
import torch

from lightning_ups._compat.torch import device as gpu
from lightning_ups._compat.torch.device import (
    CudaClock,
    Kernels,
    allocator_counters,
    begin_history,
    between_marks,
    device_memory,
    end_history,
    watched_waits,
    write_snapshot,
)

CPU = torch.device("cpu")


def test_the_cpu_has_no_such_allocator(tmp_path):
    assert allocator_counters(CPU) == {}
    assert device_memory(CPU) is None
    begin_history(CPU)
    end_history(CPU)
    assert not write_snapshot(tmp_path / "x", CPU)
    assert not (tmp_path / "x").exists()


@pytest.mark.gpu(count=1)
def test_a_gpus_counters_and_snapshot(tmp_path):
    device = torch.device("cuda", 0)
    begin_history(device)
    held = torch.empty(2**20, device=device)
    counters = allocator_counters(device)
    assert counters["allocated_bytes.all.current"] >= held.nbytes
    assert "num_alloc_retries" in counters
    assert "reserved_bytes.all.current" in counters
    assert device_memory(device) > 2**30
    assert write_snapshot(tmp_path / "x", device)
    assert (tmp_path / "x").stat().st_size > 0
    end_history(device)


class Event:
    """An event of a device whose clock is the number of cycles that it was told to spin, a million to a millisecond."""

    def __init__(self, device):
        self._device = device

    def record(self, stream):
        self.at = self._device["cycles"] / 1e6

    def elapsed_time(self, other):
        return other.at - self.at


def test_a_device_that_was_idle_is_woken_first(monkeypatch):
    device = {"cycles": 0.0}  # a million to a millisecond, and in the first 30 it does but a fifth

    def sleep(cycles):
        slow = min(cycles, max(0, 6e6 - device["work"]))
        device["work"] += cycles
        device["cycles"] += 5 * slow + cycles - slow

    device["work"] = 0.0
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(device))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "_sleep", sleep)
    clock = CudaClock(torch.device("cuda", 0))
    clock.wake()
    start = clock.mark()
    clock.hold(7.5)
    assert clock.between(start, clock.mark()) == pytest.approx(7.5)


@pytest.mark.gpu
def test_work_behind_a_hold_waits_and_its_time_is_its_own():
    clock = CudaClock(torch.device("cuda", torch.cuda.current_device()))
    x = torch.randn(2048, 2048, device="cuda")
    clock.hold(1.0)
    x @ x  # which loads libraries
    clock.wait()
    before = clock.now()
    clock.hold(200.0)
    start = clock.mark()
    x @ x
    assert not clock.passed(start)
    end = clock.mark()
    clock.wait()
    assert clock.passed(end)
    assert 50 < clock.now() - before < 5000  # other processes may use the device as well
    assert 0 < clock.between(start, end) < 100
    assert clock.allocated() >= x.nbytes
    assert 0 < clock.room() <= torch.cuda.get_device_properties(0).total_memory


@pytest.fixture
def device(monkeypatch):
    """A device whose every wait torch warns of, once it is told to."""
    modes, waited = ["default"], []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: waited.append("whole"))

    def item():
        if modes[-1] == "warn":
            warnings.warn("called a synchronizing CUDA operation (Triggered internally)", UserWarning, stacklevel=2)
        waited.append("item")

    return item, modes, waited


def test_places_that_wait_are_counted(device):
    item, modes, waited = device
    counts = Counter()
    with watched_waits(counts):
        for _ in range(3):
            item()
        torch.cuda.synchronize()
    item()
    assert sorted(counts.values()) == [1, 3]
    assert {place.rpartition(" ")[2] for place in counts} == {"(item)", "(test_places_that_wait_are_counted)"}
    assert all("test_device.py:" in place for place in counts)
    assert waited == ["item"] * 3 + ["whole", "item"]
    assert modes[-1] == "default"


def test_a_users_line_is_named_and_not_the_library_that_it_calls(device, tmp_path):
    item, _, _ = device
    library = gpu._LIBRARIES[0] + "/some/library.py"
    script = f"{tmp_path}/lightning_project/train.py"  # its own name makes no library of it
    loop = gpu._LIBRARIES[0] + "/lightning/pytorch/loops/fit_loop.py"
    counts = Counter()
    scope = {"item": item}
    exec(compile("def log():\n    item()", library, "exec"), scope)
    exec(compile("def step():\n    log()", f"{tmp_path}/lightning_project/model.py", "exec"), scope)
    exec(compile("def loop():\n    step()\ndef write():\n    log()", loop, "exec"), scope)
    for call, place in (
        ("loop()", f"{tmp_path}/lightning_project/model.py:2 (step)"),
        ("write()", f"{library}:2 (log)"),
    ):
        counts.clear()
        with watched_waits(counts):
            scope["item"] = torch.cuda.synchronize
            exec(compile(call, script, "exec"), scope)
        assert [*counts] == [place]


def test_all_is_put_back_after_an_error(device):
    _, modes, _ = device
    before = torch.cuda.synchronize, warnings.showwarning
    with pytest.raises(KeyError), watched_waits(Counter()):
        raise KeyError
    assert (torch.cuda.synchronize, warnings.showwarning) == before
    assert modes[-1] == "default"


SPIN = "at::cuda::(anonymous namespace)::spin_kernel(long)"


def test_what_lies_outside_the_marks_is_cut_off():
    kernels = [("a", 0, 10), (SPIN, 20, 21), ("b", 15, 30), ("c", 40, 60), (SPIN, 50, 51), ("d", 70, 80)]
    found = between_marks(kernels)
    assert found == [(SPIN, 20, 21), ("b", 20, 30), ("c", 40, 50), (SPIN, 50, 50)]
    assert between_marks(kernels[:3]) == kernels[:3]


@pytest.mark.gpu(count=1)
def test_marks_are_seen():
    a = torch.randn(512, 512, device="cuda")
    kernels = Kernels()
    kernels.start()
    a.sigmoid()
    kernels.mark()
    a @ a
    kernels.mark()
    a.sigmoid()
    names = [name for name, _, _ in kernels.stop()]
    assert sum("spin_kernel" in name for name in names) == 2
    assert not any("sigmoid" in name for name in names)


@pytest.mark.gpu(count=1)
def test_a_real_wait_is_found():
    counts = Counter()
    a = torch.ones(3, device="cuda")
    with watched_waits(counts):
        a.sum().item()
    assert sum(counts.values()) == 1
    assert "test_device.py" in next(iter(counts))
