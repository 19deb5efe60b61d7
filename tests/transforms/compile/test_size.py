import pytest
import torch

from lightning_ups.transforms.compile.size import MOST_CALLS, MOST_ELEMENTS, is_small


def captured(model, *inputs, dynamic=None):
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    torch.compile(model, backend=backend, dynamic=dynamic)(*inputs)
    (graph,) = graphs
    return graph


def chain(length):
    def run(x):
        for _ in range(length):
            x = x.sin()
        return x

    return run


@pytest.mark.parametrize(("length", "small"), [(3, True), (MOST_CALLS, True), (MOST_CALLS + 1, False)])
def test_few_operators_are_small(length, small):
    torch.compiler.reset()
    assert is_small(captured(chain(length), torch.ones(4))) is small


@pytest.mark.parametrize(("elements", "small"), [(MOST_ELEMENTS // 2, True), (MOST_ELEMENTS // 2 + 1, False)])
def test_large_tensors_are_not(elements, small):
    torch.compiler.reset()
    assert is_small(captured(chain(2), torch.ones(elements))) is small


def test_several_results_of_an_operator_count():
    torch.compiler.reset()
    assert not is_small(captured(lambda x: x.max(1).values + x.split(1, 1)[0][:, 0], torch.ones(MOST_ELEMENTS, 1)))


def test_sizes_that_vary_are_not_small():
    torch.compiler.reset()
    assert not is_small(captured(chain(1), torch.ones(5, 4), dynamic=True))
