"""The parity tests notice what they are for: each fault, put in on purpose, turns them red."""

import pytest
import torch

from lightning_ups.strategies import fsdp2
from tests.strategies import cases
from tests.strategies.test_parity import check, expected

OPTIONS = {"accumulate": 2, "gradient_clip_val": 0.1}


def unsynced(patch):
    patch.setattr(fsdp2, "average_gradients", lambda *_, **__: None)  # the scalars differ on each rank


def wrong_divisor(patch):
    prepare = fsdp2.FSDP2Strategy._prepare_training

    def with_factor(self, precision):
        prepare(self, precision)
        for module in self.lightning_module.layers:
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)  # a sum, not a mean

    patch.setattr(fsdp2.FSDP2Strategy, "_prepare_training", with_factor)


def dropped_microbatch(patch):
    step = fsdp2.FSDP2Strategy.training_step
    seen = []

    def zeroed(self, *args, **kwargs):
        seen.append(None)
        loss = step(self, *args, **kwargs)
        return loss * 0 if len(seen) % 2 else loss

    patch.setattr(fsdp2.FSDP2Strategy, "training_step", zeroed)


def no_clip(patch):
    patch.setattr(fsdp2.PolicyPrecision, "clip_grad_by_norm", lambda *_, **__: None)


def nothing(patch):
    pass


FAULTS = {fault.__name__: fault for fault in (nothing, unsynced, wrong_divisor, dropped_microbatch, no_clip)}


def trained(fault, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        FAULTS[fault](patch)
        return cases.on_ranks("Scalar", tmp_path, {}, 2, OPTIONS)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(ranks, tmp_path, fault):
    result, right = ranks(trained, fault, tmp_path), expected("Scalar", tmp_path, OPTIONS)
    if fault == "nothing":
        check(result, right)
        return
    with pytest.raises(AssertionError):
        check(result, right)
    assert all(torch.isfinite(torch.tensor(result["losses"])))
