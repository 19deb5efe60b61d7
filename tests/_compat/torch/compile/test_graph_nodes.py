import torch
from torch import fx

from lightning_ups._compat.torch.compile.graph_nodes import above, is_cast, is_view, packet_of

aten = torch.ops.aten


def test_what_lies_above_views_and_casts():
    graph = fx.Graph()
    x = graph.placeholder("x")
    product = graph.call_function(aten.mm.default, (x, x))
    turned = graph.call_function(aten.t.default, (product,))
    shaped = graph.call_function(aten.view.default, (turned, [4]))
    cast = graph.call_function(torch.ops.prims.convert_element_type.default, (shaped, torch.float32))
    assert [is_view(node) for node in graph.nodes] == [False, False, True, True, False]
    assert [is_cast(node) for node in graph.nodes] == [False, False, False, False, True]
    assert above(shaped, is_view) is product
    assert above(cast, is_view) is cast
    assert above(cast, lambda node: is_cast(node) or is_view(node)) is product
    assert above(2.0, is_view) == 2.0
    assert packet_of(product) is aten.mm
    assert packet_of(x) is None
