import logging
import time
from contextlib import ExitStack

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_ups.strategies import FSDP2Strategy
from lightning_ups.transforms.fsdp import collective_order
from lightning_ups.transforms.fsdp.collective_order import CollectiveOrder
from lightning_ups.transforms.sharding import StepState
from tests.strategies.cases import two_ranks
from tests.toys import Net, loader, trainer

RUNS = {  # what each rank has run in its steps
    "another branch": ([["a", "b", "c"]], [["a", "x", "c"]]),
    "another branch, and on to the next step": ([["a", "b"], ["a"]], [["a", "x"]]),
    "another order": ([["a", "b"]], [["b", "a"]]),
    "slow": ([["a", "b", "c"]], [["a"]]),
    "a step behind": ([["a", "b"], ["a"]], [["a"]]),
    "two steps behind": ([["a"], ["b"], ["c"]], [["x"]]),
    "alike": ([["a", "b"]], [["a", "b"]]),
    "before the first step": ([["a", "b"]], []),
}
APART = {"another branch": "b", "another branch, and on to the next step": "b", "another order": "a"}


def watched(runs, expected):
    texts, handler = [], logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())
    logging.getLogger(collective_order.__name__).addHandler(handler)
    collective_order.PATIENCE_S = 0.1
    watch = CollectiveOrder((), remedy="Use unused_parameters=True.", undo=ExitStack())
    watch.open()
    for step in runs[dist.get_rank()]:
        watch.begin(StepState(), ExitStack())
        for name in step:
            watch.note(name)
    deadline = time.monotonic() + (30 if expected else 1)
    while dist.get_rank() == 0 and not texts and time.monotonic() < deadline:
        time.sleep(0.05)
    dist.barrier()
    error = RuntimeError("Timed out waiting 1800000ms for recv operation to complete")
    watch.explain(error)
    watch.close()
    collective_order.PATIENCE_S = 10.0
    logging.getLogger(collective_order.__name__).removeHandler(handler)
    return texts, error.__notes__


@pytest.mark.parametrize("kind", RUNS)
def test_ranks_that_run_other_modules_are_named_and_slow_ones_are_not(ranks, kind):
    texts, notes = ranks(watched, RUNS[kind], kind in APART)
    if kind in APART:
        [text] = texts
        assert f"rank 0 has run {APART[kind]}," in text
        assert text.endswith("Use unused_parameters=True.")
        assert notes == [text]
    else:
        assert texts == []
        assert notes == ["If ranks ran different modules in a training step: Use unused_parameters=True."]


def test_an_error_that_is_no_timeout_is_left_as_it_is():
    error = ValueError("shapes differ")
    CollectiveOrder((), remedy="", undo=ExitStack()).explain(error)
    assert not hasattr(error, "__notes__")


@two_ranks
def test_a_strategy_notes_what_its_steps_run(tmp_path):
    strategy, model, noted = FSDP2Strategy(), Net(), []
    model.on_train_batch_end = lambda *_: noted.append(strategy._order._records)
    trainer(tmp_path, strategy=strategy, devices=2, epochs=1).fit(model, loader(2))
    number, ran, _ = noted[-1]
    assert number == len(noted) > 0
    assert "head" in ran
    assert any("reduction" in name for name in ran)
    assert strategy._order._over is None


def checksum(calls, *, name="training_step", reduced=()):
    model, undo = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)]), ExitStack()
    order = CollectiveOrder(model.named_children(), remedy="", undo=undo)
    x = torch.ones(1, 1)
    model[1](x)  # in no step
    for step in calls:
        with ExitStack() as within:
            order.begin(StepState(name=name), within)
            for index in step:
                model[index](x)
            with torch.no_grad():
                model[0](x)
        for weight in reduced:
            order.note(weight)
    undo.close()
    assert not any(module._forward_pre_hooks for module in model)
    return order.checksum


def test_ranks_that_run_the_same_modules_in_one_order_have_one_checksum():
    assert checksum([[0, 1]]) == checksum([[0, 1, 0]]) == checksum([[0, 1, 1]])  # later calls do not count
    different = [checksum([[0, 1]]), checksum([[1, 0]]), checksum([[0]]), checksum([[0, 1], [0, 1]])]
    assert len({*different}) == len(different)


def test_what_is_reduced_counts_and_evaluation_does_not():
    assert checksum([[0]], reduced=["0.weight"]) != checksum([[0]], reduced=["0.bias"]) != checksum([[0]])
    assert checksum([[0, 1]], name="validation_step") == checksum([[]], name="validation_step") == 0
