import warnings
from collections import Counter

import pytest
import torch
from torch.profiler import profile

from lightning_ups._compat.torch import kernels_seen
from lightning_ups._compat.torch.kernels_seen import Kernels, between_marks, is_profiled, watched_waits


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
    assert all("test_kernels_seen.py:" in place for place in counts)
    assert waited == ["item"] * 3 + ["whole", "item"]
    assert modes[-1] == "default"


def test_a_users_line_is_named_and_not_the_library_that_it_calls(device, tmp_path):
    item, _, _ = device
    library = kernels_seen._LIBRARIES[0] + "/some/library.py"
    script = f"{tmp_path}/lightning_project/train.py"  # its own name makes no library of it
    loop = kernels_seen._LIBRARIES[0] + "/lightning/pytorch/loops/fit_loop.py"
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


def test_other_warnings_are_shown(device):
    shown = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_, **__: shown.append(str(message))
        with watched_waits(Counter()):
            warnings.warn("something else", UserWarning, stacklevel=1)
    assert shown == ["something else"]


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
def test_a_profiler_of_somebody_else_is_seen():
    assert not is_profiled()
    with profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert is_profiled()


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
def test_kernels_are_seen():
    a = torch.randn(512, 512, device="cuda")
    kernels = Kernels()
    kernels.start()
    b = a @ a
    b.add_(torch.ones(512, 512).pin_memory().to("cuda", non_blocking=True))
    found = kernels.stop()
    assert any("Memcpy HtoD" in name for name, _, _ in found)
    assert all(start <= end for _, start, end in found)
    assert len(found) >= 3


@pytest.mark.gpu(count=1)
def test_a_real_wait_is_found():
    counts = Counter()
    a = torch.ones(3, device="cuda")
    with watched_waits(counts):
        a.sum().item()
    assert sum(counts.values()) == 1
    assert "test_kernels_seen.py" in next(iter(counts))
