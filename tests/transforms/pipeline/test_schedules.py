"""What torch's schedules compute here is in tests/strategies/test_pipeline.py."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_ups.transforms.pipeline import SCHEDULES, Stage, build_schedule, cut_model


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(4))


def called(schedule, divides):
    """Return the calls of the stages of both ranks: (stage, microbatch, whether something was received)."""
    cut = cut_model(Chain(), size=2, schedule=schedule, rank=dist.get_rank(), blocks=["blocks.*"])
    calls = []
    weight = nn.Parameter(torch.ones(()))

    def stage_of(number):
        def run(microbatch, received):
            calls.append((number, microbatch, received is not None))
            if number + 1 == len(cut.stages):
                return (received * weight).sum().double()
            return torch.full((3, 2), float(microbatch)) * weight if received is None else received * weight

        return Stage(run, lambda: [weight])

    run = build_schedule(
        cut,
        [stage_of(number) for number in cut.own_stages],
        hidden=torch.empty(3, 2, device="meta"),
        microbatches=4,
        loss_scale=lambda: 0.5,
        divides=divides,
        device=torch.device("cpu"),
        group=dist.group.WORLD,
    )
    run()
    run()
    found = [None, None]
    dist.all_gather_object(found, (calls, weight.grad))
    return found


@pytest.mark.parametrize("divides", [True, False])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_stage_gets_each_microbatch_in_order(ranks, schedule, divides):
    (first, gradient), (other, its) = ranks(called, schedule, divides)
    for stage in range(2 if schedule == "1F1B" else 4):
        own = [call for call in (*first, *other) if call[0] == stage]
        assert own == [(stage, number, stage > 0) for number in range(4)] * 2
    # Each of the stages multiplies by 1, and 6 numbers of each microbatch are summed.
    total = 0.5 * 6 * sum(range(4)) * 2
    stages = 1 if schedule == "1F1B" else 2
    assert gradient == its == stages * total
