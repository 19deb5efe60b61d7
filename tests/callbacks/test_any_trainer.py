"""Whatever a stock Trainer runs, it runs with our callbacks in its list: to the same bits, leaving nothing behind."""

import warnings

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy

from lightning_ups.strategies import FSDP2Strategy
from tests.callbacks.any_trainer import compare, draw

pytestmark = pytest.mark.filterwarnings("default")  # both runs may warn of the same; `compare` tells what ours add


def check(seed, tmp_path):
    torch.compiler.reset()
    found = compare(draw(seed), tmp_path)
    assert found == "" or found.startswith("refused: ValueError"), found


@pytest.mark.parametrize(
    "seed", [0, 5, 23, 28, 33, 72, 87, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 9, 15, 31, 46, 79))]
)
def test_what_a_seed_draws(tmp_path, seed):
    check(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(88, 320))
def test_what_other_seeds_draw(tmp_path, seed):
    check(seed, tmp_path)


STRATEGIES = {"ddp": DDPStrategy, "fsdp2": FSDP2Strategy}


def check_ranked(name, seed, path):
    torch.compiler.reset()
    warnings.simplefilter("default")
    return compare(draw(seed, ranks=True), path, STRATEGIES[name])


QUICK = {(402, "ddp"), (413, "fsdp2")}


@pytest.mark.parametrize(
    ("seed", "name"),
    [
        pytest.param(seed, name, marks=() if (seed, name) in QUICK else pytest.mark.slow)
        for seed in range(400, 460)
        for name in STRATEGIES
    ],
)
def test_what_a_seed_draws_for_two_ranks(ranks, tmp_path, name, seed):
    found = ranks(check_ranked, name, seed, tmp_path)
    assert found == "" or found.startswith("refused: ValueError"), f"{found} of {draw(seed, ranks=True)}"
