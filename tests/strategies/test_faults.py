"""The parity tests notice what they are for: each fault, put in on purpose, turns them red."""

import pytest
import torch
from torch.distributed.tensor import Partial

from lightning_ups.order import PolicyPrecision
from lightning_ups.strategies import fsdp2, sharding
from lightning_ups.transforms.simple_fsdp import parametrize as parametrise
from tests.strategies import cases
from tests.strategies.test_parity import check, expected

OPTIONS = {"accumulate": 2, "gradient_clip_val": 0.1}


def unsynced(patch):
    patch.setattr(sharding, "average_gradients", lambda *_, **__: None)  # the scalars differ on each rank


def wrong_divisor(patch):
    prepare = fsdp2.FSDP2Strategy._prepare_training

    def with_factor(self, precision):
        prepare(self, precision)
        for module in self.lightning_module.layers:
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)  # a sum, not a mean

    patch.setattr(fsdp2.FSDP2Strategy, "_prepare_training", with_factor)


def wrong_mean(patch):
    patch.setattr(parametrise, "Partial", lambda _: Partial("sum"))


def unreduced(patch):
    def own_part(self, shard, *, cast, splits):
        return shard.redistribute(placements=self._whole).to_local()  # as if all ranks had one gradient

    patch.setattr(parametrise.Gathering, "whole", own_part)


def dropped_microbatch(patch):
    step = sharding.ShardingStrategy.training_step
    seen = []

    def zeroed(self, *args, **kwargs):
        seen.append(None)
        loss = step(self, *args, **kwargs)
        return loss * 0 if len(seen) % 2 else loss

    patch.setattr(sharding.ShardingStrategy, "training_step", zeroed)


def no_clip(patch):
    patch.setattr(PolicyPrecision, "clip_grad_by_norm", lambda *_, **__: None)


def nothing(patch):
    pass


COMMON = (nothing, unsynced, dropped_microbatch, no_clip)
FAULTS = {fault.__name__: fault for fault in (*COMMON, wrong_divisor, wrong_mean, unreduced)}


def trained(fault, tmp_path, way):
    with pytest.MonkeyPatch.context() as patch:
        FAULTS[fault](patch)
        return WAYS[way]("Scalar", tmp_path, {}, 2, OPTIONS)


WAYS = {"fsdp2": cases.on_ranks, "simple_fsdp": cases.simply_on_ranks}
CASES = [
    *((fault.__name__, "fsdp2") for fault in COMMON),
    *(pytest.param(fault.__name__, "simple_fsdp", marks=pytest.mark.slow) for fault in COMMON),
    ("wrong_divisor", "fsdp2"),
    ("wrong_mean", "simple_fsdp"),
    ("unreduced", "simple_fsdp"),
]


@pytest.mark.parametrize(("fault", "way"), CASES)
def test_a_fault_is_seen(ranks, tmp_path, fault, way):
    result, right = ranks(trained, fault, tmp_path, way), expected("Scalar", tmp_path, OPTIONS)
    if fault == "nothing":
        check(result, right)
        return
    with pytest.raises(AssertionError):
        check(result, right)
    assert all(torch.isfinite(torch.tensor(result["losses"])))
