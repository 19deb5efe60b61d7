import math

import pytest
import torch

from lightning_ups.insight.verify.comparison import (
    REST,
    BlockStep,
    Step,
    band_between,
    departures,
    distances,
    first_block,
    is_same,
    largest,
    sampled,
)

NAMES = ["layers.0", "layers.1", "layers.2"]


def training(*, noise=0.0, seed=1, steps=2, change=None):
    random = torch.Generator().manual_seed(0)
    noisy = torch.Generator().manual_seed(seed)

    def values():
        right = torch.randn(400, generator=random)
        return right + noise * torch.randn(400, generator=noisy)

    found = []
    for _ in range(steps):
        blocks = {
            name: BlockStep(given=values(), added=values(), passed=values(), gradient=values(), norm=1.0 + noise / 3)
            for name in NAMES
        }
        blocks[REST] = BlockStep(gradient=values(), norm=1.0)
        found.append(Step(loss=2.0 + noise / 10, norm=2.0, blocks=blocks))
    if change is not None:
        change(found[0].blocks)
    return found


def found_by(change=None, *, noise=0.01, **options):
    plain = training(**options)
    band = band_between(plain, training(noise=0.01, seed=7, **options))
    return departures(plain, training(noise=noise, change=change, **options), band)


def test_another_training_with_the_same_rounding_stays_in_the_band():
    assert not found_by()
    assert found_by(noise=0.05)


def scale(name, what, factor):
    def change(blocks):
        setattr(blocks[name], what, getattr(blocks[name], what) * factor)

    return change


def gone(name, what):
    return lambda blocks: setattr(blocks[name], what, None)


@pytest.mark.parametrize(
    ("change", "block"),
    [
        (scale("layers.1", "added", 1.5), "layers.1"),
        (gone("layers.1", "added"), "layers.1"),
        (scale("layers.1", "norm", 2.0), "layers.1"),
        (gone("layers.2", "gradient"), "layers.2"),
        (scale("layers.1", "passed", -1.0), "layers.1"),
        (scale("layers.1", "given", 1.5), "layers.0"),  # who gave it
        (scale("layers.0", "given", 1.5), REST),
        (scale(REST, "norm", 2.0), REST),
    ],
)
def test_a_fault_is_named_by_its_block(change, block):
    assert first_block(found_by(change), NAMES) == block


def test_the_first_of_several_is_the_first_that_ran():
    def forward(blocks):
        for name in NAMES[1:]:
            scale(name, "added", 2.0)(blocks)
        scale("layers.2", "gradient", -1.0)(blocks)

    assert first_block(found_by(forward), NAMES) == "layers.1"

    def backward(blocks):
        for name in NAMES[:2]:
            scale(name, "gradient", -1.0)(blocks)

    assert first_block(found_by(backward), NAMES) == "layers.1"  # backward comes to it first


def test_nan_leaves_every_band():
    found = found_by(scale("layers.1", "added", math.nan))
    assert first_block(found, NAMES) == "layers.1"
    plain = training()
    assert (
        largest(plain, training(change=scale("layers.1", "added", math.nan)), band_between(plain, plain)).excess > 1e9
    )


def test_a_loss_alone_names_no_block():
    plain, other = training(), training(noise=0.01)
    other[0].loss = 3.0
    found = departures(plain, other, band_between(plain, training(noise=0.01, seed=7)))
    assert [(each.what, each.block) for each in found] == [("loss", None)]
    assert first_block(found, NAMES) is None


def test_steps_without_a_loss_agree_with_no_others():
    silent = training()
    silent[0].loss = None
    assert is_same(silent, [*silent])
    assert [each.what for each in departures(training(), silent, band_between(training(), training()))] == ["loss"]


def test_a_training_that_ends_early_leaves_the_band():
    plain = training()
    assert departures(plain, training(steps=1), band_between(plain, plain))


def test_a_block_without_gradients_on_both_sides_agrees():
    def still(blocks):
        blocks["layers.0"].gradient, blocks["layers.0"].norm = torch.zeros(400), 0.0

    plain = training(change=still)
    assert not [each for each in distances(plain, training(change=still)) if each.distance]


def test_a_sample_is_the_same_for_equal_sizes_and_small_tensors_are_whole():
    small = torch.arange(10.0)
    assert torch.equal(sampled(small), small)
    large = torch.arange(200_000.0)
    assert torch.equal(sampled(large), sampled(large.clone().view(400, 500)))
    assert len(sampled(large)) == 2**16
