"""Whatever a stock Trainer runs, it runs with our callbacks in its list: to the same bits, leaving nothing behind."""

import pytest
import torch

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
