"""Whatever float32 trains, a precision trains nearby, leaves as it was, saves plainly and resumes to the bit."""

import pytest
import torch
import torch.distributed as dist

from lightning_ups.precision import BF16Precision
from tests.precision.any_precision import Any, compare, draw, fit, plainly
from tests.processor import needs_lstm_by_autocast

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

SEEDS = [5, 11, 25, 34, 40, 46, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (6, 22, 31, 35, 42, 45, 49))]
RANKED = [8, 14, 16, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (9, 15, 19))]

# Each was found by a seed, made smaller part by part, and differed or failed.
FOUND = {
    "an optimizer that makes its state at once": plainly(
        ("bare", "list"), optimizer="adagrad", checks=("resume", "twice", "to plain")
    ),
    "scales for rows, evaluated in inference mode": plainly(
        ("wide", "plain"), precision=("float8", {"recipe": "rowwise", "emulate": True}), checks=("around", "validate")
    ),
    "two steps within one autocast": plainly(
        ("rebound", "list"), precision=("bf16", {"weights": "autocast"}), manual="plain", optimizers=2, checks=()
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found(tmp_path, name):
    assert compare(FOUND[name], tmp_path) == ""


@pytest.mark.parametrize("ranked", [False, True])
@pytest.mark.parametrize(("part", "kind"), [("wide", "te"), ("lstm", "bf16"), ("conv", "bf16")])
def test_types_that_only_autocast_mixes_are_named_with_a_cure_that_works(tmp_path, ranks, part, kind, ranked):
    if part == "lstm":
        needs_lstm_by_autocast()
    # The outermost of these modules is not called, and so casts nothing.
    options = {"recipe": None} if kind == "te" else {}
    drawn = plainly(
        (part, "nested"), precision=(kind, {"weights": "masters", **options}), ranks=1 + ranked, checks=("validate",)
    )
    found = ranks(compare, drawn, tmp_path) if ranked else compare(drawn, tmp_path)
    assert found.startswith("refused, and cured")


@pytest.mark.parametrize("clip", [None, 0.1])
def test_what_is_unfrozen_under_ddp_is_trained_by_the_gradients_of_all_ranks(ranks, tmp_path, clip):
    """DDP reduces nothing that was frozen when it began: its ranks would part."""
    drawn = plainly(("bare", "plain"), unfreeze=True, clip=clip, ranks=2, checks=())
    together = ranks(unfrozen, drawn, tmp_path / "two")
    alone = unfrozen({**drawn, "ranks": 1}, tmp_path / "one")
    started = dict(Any(drawn).named_parameters())
    assert together.keys() == alone.keys() == started.keys()
    for name, value in alone.items():
        moved = (value - started[name]).norm()
        assert moved > 1e-5
        assert (together[name] - value).norm() < 0.2 * moved + 1e-4


def unfrozen(drawn, path):
    """Train; return the weights, if all ranks have the same."""
    weights = fit(drawn, path, BF16Precision(weights="masters")).weights
    if drawn["ranks"] > 1:
        for value in weights.values():
            lowest, highest = value.clone(), value.clone()
            dist.all_reduce(lowest, dist.ReduceOp.MIN)
            dist.all_reduce(highest, dist.ReduceOp.MAX)
            assert torch.equal(lowest, highest)
    return weights


@pytest.mark.parametrize("seed", SEEDS)
def test_what_a_seed_draws(tmp_path, seed):
    drawn = draw(seed)
    assert drawn["ranks"] == 1
    found = compare(drawn, tmp_path)
    assert found == "" or found.startswith("refused, and cured"), f"{found} of {drawn}"


@pytest.mark.parametrize("seed", RANKED)
def test_what_a_seed_draws_for_two_ranks(ranks, tmp_path, seed):
    drawn = draw(seed)
    assert drawn["ranks"] == 2
    found = ranks(compare, drawn, tmp_path)
    assert found == "" or found.startswith("refused, and cured"), f"{found} of {drawn}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60, 460))
def test_what_other_seeds_draw(ranks, tmp_path, seed):
    drawn = draw(seed)
    found = compare(drawn, tmp_path) if drawn["ranks"] == 1 else ranks(compare, drawn, tmp_path)
    assert found == "" or found.startswith(("refused, and cured", "not")), f"{found} of {drawn}"
