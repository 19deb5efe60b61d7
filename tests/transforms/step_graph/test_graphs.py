import pytest
import torch
from torch import nn

from lightning_ups.transforms.step_graph import CudaGraph, EmulatedGraph, warmed_up


def steps(weight, x):
    """A step that reads ``x`` and writes a gradient and a loss."""

    def step():
        weight.grad = None
        loss = (weight * x).square().sum()
        loss.backward()
        return [loss.detach()]

    return step


def test_an_emulated_graph_writes_to_the_memory_of_its_outputs():
    weight = nn.Parameter(torch.ones(3))
    graph = EmulatedGraph([weight])
    step = steps(weight, x := torch.ones(3))
    with warmed_up(None):
        step()
    (loss,) = graph.capture(step)
    gradient = weight.grad
    x.fill_(2)
    graph.replay()
    assert (loss.item(), gradient.tolist()) == (12, [8, 8, 8])
    assert weight.grad is gradient


@pytest.mark.gpu
def test_a_cuda_graph_does_so_too():
    weight, x = nn.Parameter(torch.ones(3, device="cuda")), torch.ones(3, device="cuda")
    stream = torch.cuda.Stream()
    graph, step = CudaGraph(stream, torch.cuda.graph_pool_handle()), steps(weight, x)
    with warmed_up(stream):
        step()
    (loss,) = graph.capture(step)
    gradient = weight.grad
    assert (loss.item(), gradient.tolist()) == (3, [2, 2, 2])
    x.fill_(2)
    graph.replay()
    assert (loss.item(), gradient.tolist()) == (12, [8, 8, 8])
    assert weight.grad is gradient


@pytest.mark.gpu
def test_the_error_of_a_failed_capture_is_that_of_the_step():
    stream = torch.cuda.Stream()
    x = torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError, match="captur"):
        CudaGraph(stream, torch.cuda.graph_pool_handle()).capture(lambda: [x * x.sum().item()])
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert x.sum().item() == 3
    assert len({*torch.rand(9, device="cuda").tolist()}) == 9, "random numbers are out of the capture"
