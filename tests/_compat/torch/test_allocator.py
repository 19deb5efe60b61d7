import pytest
import torch

from lightning_ups._compat.torch.allocator import (
    allocator_counters,
    begin_history,
    device_memory,
    end_history,
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
