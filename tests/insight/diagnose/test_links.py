import torch

from lightning_ups.insight.diagnose.links import collective_rates, copy_rates, gpu_state, matmul_rate, topology

CPU = torch.device("cpu")


def test_a_cpu_has_a_memory_and_products_and_no_gpu():
    assert [*copy_rates(CPU)] == ["memory"]
    assert copy_rates(CPU)["memory"] > 1e8
    assert matmul_rate(CPU) > 1e8
    assert topology(CPU) == gpu_state(CPU) == {}


def sweep():
    return collective_rates(CPU)


def test_collectives_are_swept_by_size(ranks):
    rows = ranks(sweep)
    assert {row["what"] for row in rows} == {"all-reduce", "all-gather", "reduce-scatter"}
    assert len({row["bytes"] for row in rows}) == len(rows) // 3 > 2
    assert all(row["bus_bytes_per_s"] > 0 for row in rows)
