from dataclasses import replace

import pytest
import torch

from tests import fake_te
from tests.real_te import need_engine

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the benchmark itself")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture
def script(import_benchmark, monkeypatch):
    script = import_benchmark("verify")
    monkeypatch.setattr(script, "CUDA", False)
    monkeypatch.setattr(script, "SHAPE", replace(script.SHAPE, num_layers=4))
    monkeypatch.setattr(script, "FAULTY", "model.layers.2")
    return script


@on_cpu
def test_a_case_is_green_and_names_the_block_of_a_fault(script):
    found = script.seen("tensorwise", faults=["a stale scale"])
    assert found["ok"]
    assert found["green"]
    assert found["smallest fault, in bands"] > 2
    assert found["faults"] == {"a stale scale": "model.layers.2"}


@on_cpu
def test_a_fault_that_is_not_seen_or_is_blamed_on_another_block_is_no_success(script, monkeypatch):
    class Nothing:
        departures, block = (), None

    class Other:
        departures, block = (1,), "model.layers.3"

    verify, later = script.verify, [Nothing, Other]
    monkeypatch.setattr(script, "verify", lambda trial, **asked: later.pop(0) if asked else verify(trial))
    found = script.seen("bf16", faults=["a stale scale", "a skipped block"])
    assert found["green"]
    assert found["faults"] == {"a stale scale": "not seen", "a skipped block": "model.layers.3"}
    assert not found["ok"]


@on_cpu
@pytest.mark.parametrize("recipe", ["none", "delayed", "current", "block"])
def test_recipes_of_transformer_engine_are_tried_by_its_double(script, recipe):
    with fake_te.installed():
        assert script.unmet(["bf16", recipe]) is None
        found = script.seen(recipe, faults=["a skipped block"])
    assert found["ok"], found


def test_what_is_missing_is_said_before_anything_runs(script, monkeypatch):
    monkeypatch.setattr(script, "unloadable", lambda package, what, load=None: f"{what} needs {package}")
    assert script.unmet(["bf16", "bf16, compiled"]) is None
    assert "needs transformer_engine: name others" in script.unmet(["current, compiled"])
    assert "needs torchao.float8: name others" in script.unmet(["rowwise"])


@pytest.mark.slow  # each trains several times, which takes a GPU about a minute
@pytest.mark.gpu(capability=(9, 0))
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed", "current", "block"])
def test_a_recipe_is_green_and_a_fault_is_red_on_a_gpu(import_benchmark, recipe):
    script = import_benchmark("verify")
    if recipe in script.ENGINE:
        need_engine()
    found = script.seen(recipe, faults=["a stale scale"])
    assert found["ok"], found
