"""``reshard_after_forward="auto"``: gathers of a step before and after the decision, counted."""

from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch import nn

from lightning_ups.order import applied
from lightning_ups.strategies import FSDP2Strategy
from tests.strategies import cases
from tests.strategies.cases import two_ranks
from tests.strategies.test_collectives import Count
from tests.toys import loader, trainer

GIB = 2**30


class OneGroup(cases.Case):
    def build(self):
        self.net = nn.Linear(cases.WIDTH, 1)

    def run(self, x):
        return self.net(x)


def gathers(tmp_path, headroom, fits, name="Case"):
    """Return the gathers of each step of two fits, the losses, and what was reported."""
    strategy, steps, reports = FSDP2Strategy(reshard_after_forward="auto"), [], []

    def watch(model):
        model.on_train_epoch_start = count.seen.clear
        model.on_train_epoch_end = lambda: steps[-1].append(count.seen["gather"])
        model.on_train_end = lambda: reports.append(applied(model.trainer.strategy).report.parts["FSDP2Strategy"])

    with Count() as count, patch("lightning_ups.strategies.fsdp2.least_headroom", lambda _: (headroom, GIB)):
        for _ in range(fits):
            steps.append([])
            result = cases.train(name, tmp_path, strategy=strategy, ranks=2, steps=4, prepare=watch)[2]
    return steps, result, reports


def test_gathered_once_a_step_from_the_third_on(ranks, tmp_path):
    (steps,), result, (report,) = ranks(gathers, tmp_path, GIB, 1)
    # Two blocks and the model's own group; the head runs last, and is whole until its backward.
    assert steps == [5, 5, 3, 3]
    assert report["keeps_gathered"] is True
    assert report["gathered_bytes"] > 0
    assert "gathered parameters are kept for backward: 0.00 GiB gathered fit" in report["lines"][-1]
    expected = cases.train("Case", tmp_path, steps=4)[2]
    assert result["losses"] == pytest.approx(expected["losses"], rel=1e-5)


def test_without_room_nothing_changes(ranks, tmp_path):
    (steps,), _, (report,) = ranks(gathers, tmp_path, 0, 1)
    assert steps == [5, 5, 5, 5]
    assert report["keeps_gathered"] is False


@two_ranks
def test_there_is_nothing_to_free_the_only_group_for(tmp_path):
    with patch.dict(cases.CASES, OneGroup=OneGroup):
        (steps,), _, (report,) = gathers(tmp_path, 0, 1, name="OneGroup")
    assert steps == [1, 1, 1, 1]
    assert "keeps_gathered" not in report


@two_ranks
@pytest.mark.filterwarnings("ignore")
def test_gradients_are_reduced_when_the_fullest_rank_must(tmp_path):
    strategy, rank = FSDP2Strategy(), dist.get_rank()
    with patch("lightning_ups.strategies.fsdp2.free_memory", lambda _: 0 if rank == 1 else 2**40):
        run = trainer(tmp_path, strategy=strategy, devices=2, accumulate_grad_batches=2, epochs=0)
        run.fit(cases.Case(), loader())
    assert strategy._sync_in_effect == "every"
