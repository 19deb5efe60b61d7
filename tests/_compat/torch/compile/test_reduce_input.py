import pytest
import torch
from torch._inductor.fx_passes import bucketing  # noqa: F401, TID251  (defines the operator)
from torch.fx.experimental.proxy_tensor import make_fx

from lightning_ups._compat.torch.compile.reduce_input import cast_where_copied

HALF, FULL = torch.bfloat16, torch.float32


def cast(tensor):
    return torch.ops.prims.convert_element_type.default(tensor, FULL)


def count(graph, operator):
    return len(graph.graph.find_nodes(op="call_function", target=operator))


def together(*gradients):
    return torch.ops.bucketing._pre_bucket_reduce_scatter.default([*gradients], 2)


def alone(a, b):
    return together(cast(a.mm(a.t())), b)


def needed_elsewhere(a, b):
    product = cast(a.mm(a.t()))
    return together(product, b) + product.sum()


def turned(a, b):
    return together(cast(a.mm(a.t()).t()).contiguous(), b)


def computed_with_its_cast(a, b):
    return together(cast(a * 2), b)


@pytest.mark.parametrize(
    ("function", "casts"), [(alone, 0), (needed_elsewhere, 1), (turned, 1), (computed_with_its_cast, 1)]
)
def test_a_cast_that_nothing_else_needs_is_left_to_the_copy(function, casts):
    a, b = torch.randn(4, 6, dtype=HALF), torch.randn(2, 3)
    right = function(a, b)
    graph = make_fx(function, tracing_mode="fake")(a, b)
    cast_where_copied(graph.graph)
    graph.graph.lint()
    graph.recompile()
    assert count(graph, torch.ops.prims.convert_element_type.default) == casts
    assert count(graph, torch.ops.lightning_ups.reduce_scatter_input.default) == 1 - casts
    assert torch.equal(graph(a, b), right)
    assert right.dtype == FULL


def test_the_operator_is_one_that_compilers_can_trace():
    operator = torch.ops.lightning_ups.reduce_scatter_input.default
    arguments = ([torch.randn(4, 3, dtype=HALF), torch.randn(2)], 2, FULL)
    torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))
    parts = operator(*arguments).view(2, -1)
    assert torch.equal(parts[1], torch.cat([arguments[0][0][2:].float().flatten(), arguments[0][1][1:]]))
