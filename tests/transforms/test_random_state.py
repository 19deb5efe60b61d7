import random

import numpy
import torch

from lightning_ups.state.checkpoint import meta
from lightning_ups.transforms.random_state import random_state, restore_random_state, seed_from


def draw(generator=None):
    own = torch.rand((), generator=generator).item() if generator is not None else 0
    return random.random(), random.gauss(0, 1), numpy.random.rand(), numpy.random.randn(), torch.rand(()).item(), own


def test_every_generator_goes_on_where_it_was(tmp_path):
    generator = torch.Generator().manual_seed(3)
    draw(generator)
    state = random_state([generator])
    expected = draw(generator), draw(generator)
    restore_random_state(state, [generator])
    assert (draw(generator), draw(generator)) == expected
    (tmp_path / "s").write_bytes(meta.dumped(state))
    restored, left = meta.loaded(tmp_path / "s")
    assert left == {}, "it is read without trusting anything"
    restore_random_state(restored, [generator])
    assert (draw(generator), draw(generator)) == expected


def test_a_new_rank_is_seeded_alike_every_time_and_unlike_others():
    state = random_state()
    seed_from(state, rank=3)
    first = draw()
    draw()
    seed_from(state, rank=3)
    assert draw() == first
    seed_from(state, rank=4)
    assert draw() != first
