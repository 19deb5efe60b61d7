import pytest
import torch
from torch import nn

from lightning_ups.insight.memory.owners import holders, is_out_of_memory
from lightning_ups.optim import MasteredOptimizer, MasterWeights

CPU = torch.device("cpu")


def module():
    return nn.Sequential(nn.Linear(64, 64, bias=False), nn.BatchNorm1d(64), nn.Linear(64, 64, bias=False))


def stepped(model, optimizer):
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
    return optimizer


def test_holders_by_kind_and_block():
    model = module()
    optimizer = stepped(model, torch.optim.AdamW(model.parameters()))
    found = holders(model, optimizers=[optimizer], blocks={"first": model[0]}, device=CPU)
    matrix = 64 * 64 * 4
    assert found.held["parameters", "first"] == matrix
    assert found.held["gradients", "first"] == matrix
    assert found.of("parameters") == 2 * matrix + 2 * 512  # vectors of 256 bytes are two grains
    assert found.of("optimizer state") >= 4 * matrix
    assert found.of("buffers") == 3 * 512
    assert found.of("master weights") == 0


def test_master_weights_are_not_parameters():
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    masters = MasterWeights(model, dtype=torch.bfloat16)
    optimizer = MasteredOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), masters)
    found = holders(model, optimizers=[optimizer], blocks={}, device=CPU)
    assert found.by_kind() == {"master weights": 64 * 64 * 4, "parameters": 64 * 64 * 2}


def test_the_rest_is_activations():
    model = module()
    found = holders(model, blocks={}, device=CPU, total=10**6)
    assert found.total == 10**6
    assert found.of("activations") > 9 * 10**5


def test_tied_weights_are_counted_once():
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    model[1].weight = model[0].weight
    assert holders(model, blocks={"a": model[0], "b": model[1]}, device=CPU).held == {("parameters", "a"): 64 * 64 * 4}


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"),
        MemoryError(),
    ],
)
def test_errors_of_allocators(error):
    assert is_out_of_memory(error)
    outer = ValueError("the compiler's own")
    outer.__cause__ = error
    assert is_out_of_memory(outer)


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), ValueError("out of memory"), None])
def test_other_errors(error):
    assert not is_out_of_memory(error)
