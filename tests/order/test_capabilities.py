"""Refusals read what strategies, precisions and callbacks state, and no attribute by name."""

import ast
from pathlib import Path

import pytest
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy

import lightning_ups.order as order
from lightning_ups.order import PrecisionCapabilities
from lightning_ups.order.capabilities import capabilities_of
from lightning_ups.precision import BF16Precision, Float8Precision
from lightning_ups.strategies import FSDP2Strategy, SimpleFSDPStrategy


@pytest.mark.parametrize("name", ["refusals", "placement", "policy"])
def test_nothing_is_looked_up_by_name(name):
    tree = ast.parse((Path(order.__file__).parent / f"{name}.py").read_text())
    calls = [node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    assert {"getattr", "hasattr"}.isdisjoint(calls)


def test_precisions_state_what_they_do():
    assert capabilities_of(MixedPrecision("bf16-mixed", "cpu")) == PrecisionCapabilities()
    assert capabilities_of(BF16Precision()) == PrecisionCapabilities()
    assert capabilities_of(BF16Precision(weights="masters")).holds_masters
    assert capabilities_of(Float8Precision(recipe="tensorwise", all_gather=True)).wants_float8_gathers
    assert not capabilities_of(Float8Precision(recipe="tensorwise")).wants_float8_gathers, "it is only allowed"


@pytest.mark.parametrize(
    ("strategy", "shards", "ours", "whole_graph"),
    [(FSDP2Strategy, True, True, False), (SimpleFSDPStrategy, True, True, True), (DDPStrategy, False, False, False)],
)
def test_strategies_state_what_they_do(strategy, shards, ours, whole_graph):
    for given in (strategy, strategy()):
        placement = order.Placement.of(given)
        assert (placement.shards, placement.ours, placement.whole_graph) == (shards, ours, whole_graph)
        assert bool(placement.settings) is (ours and given is not strategy)
