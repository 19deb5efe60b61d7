"""Graphs of layers with a scale for each row; what they compute is tested with the other recipe in test_product."""

import pytest

from lightning_ups.transforms.float8 import row_product as float8_row_product
from lightning_ups.transforms.recompute.wrapping import recompute
from tests.transforms.float8.test_product import OURS, beside_torchao, converted, graphs_of

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")


# Columns: of weights, and of gradients and inputs.
@pytest.mark.parametrize(("recipe", "columns", "maxima"), [("rowwise", 3 + 5, 3 + 5), ("rowwise_with_gw_hp", 3, 0)])
def test_a_graph_casts_a_shared_input_once_in_each_order(recipe, columns, maxima):
    forward, backward = graphs_of(converted(recipe=recipe))
    assert forward[OURS.float8_scaled_rows.default] == 3 + 2  # weights, what gate and up share, what down is given
    assert backward[OURS.float8_scaled_rows.default] == 3
    both = forward + backward  # the smaller of an input and its cast is kept
    assert both[OURS.float8_scaled_columns.default] == columns
    assert both[OURS.float8_column_maxima.default] == maxima


@beside_torchao
def test_what_is_recomputed_casts_no_weight_in_the_order_of_forward(monkeypatch):
    monkeypatch.setattr(float8_row_product, "_kernel_scales", lambda _: True)  # as on a GPU
    net = converted(recipe="rowwise")
    with recompute([net], save="matmuls"):
        _, backward = graphs_of(net)
    assert backward[OURS.float8_scaled_rows.default] == 3  # gradients
