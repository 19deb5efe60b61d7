import pytest
import torch

from lightning_ups.data.fields.windows import InMemory, Statistics, Windows

FILMS = torch.arange(2 * 7 * 2 * 4.0).reshape(2, 7, 2, 4)
SOURCE = InMemory(FILMS, torch.tensor([[0.0], [1.0]]), fields=("a", "b"))
CHOSEN = [(SOURCE, 0), (SOURCE, 1)]
PLAIN = Statistics(torch.zeros(2), torch.ones(2), torch.zeros(1), torch.ones(1))


def windows(**options):
    return Windows(CHOSEN, **{"statistics": PLAIN, "inputs": 2, "targets": 3, **options})


def test_targets_follow_inputs_in_every_trajectory():
    found = windows()
    assert len(found) == 2 * 3
    inputs, targets, conditions = found[4]
    assert torch.equal(inputs, FILMS[1, 1:3])
    assert torch.equal(targets, FILMS[1, 3:6])
    assert conditions.tolist() == [1]


def test_a_batch_is_that_of_its_samples():
    found = windows()
    for part, batch in enumerate(found.__getitems__([5, 0])):
        assert torch.equal(batch, torch.stack([found[5][part], found[0][part]]))


def test_windows_may_be_further_apart():
    assert torch.equal(windows(inputs=1, targets=2, stride=2)[2][0], FILMS[0, 4:5])
    assert len(windows(inputs=1, targets=2, stride=2)) == 2 * 3


def test_windows_that_are_too_long_are_refused():
    with pytest.raises(ValueError, match="need 8 frames"):
        windows(targets=6)


RANDOM = torch.randn(5, 7, 2, 9, generator=torch.Generator().manual_seed(0)) * 3 + 100
RANDOM_CHOSEN = [(InMemory(RANDOM, torch.arange(5.0)[:, None], fields=("a", "b")), index) for index in range(5)]


class TestStatistics:
    def test_they_are_those_of_all_values(self):
        known = Statistics.of(RANDOM_CHOSEN)
        channels = RANDOM.double().transpose(1, 2).transpose(0, 1).flatten(1)
        torch.testing.assert_close(known.mean.double(), channels.mean(1), rtol=1e-6, atol=0)
        torch.testing.assert_close(known.std.double(), channels.std(1, correction=0), rtol=1e-6, atol=0)
        assert known.condition_mean.item() == 2
        assert known.condition_std.item() == pytest.approx(2**0.5)

    def test_normalized_fields_have_mean_0_and_deviation_1_and_come_back(self):
        known = Statistics.of(RANDOM_CHOSEN)
        normal = known.normalized(RANDOM)
        torch.testing.assert_close(normal.mean(dim=(0, 1, 3)), torch.zeros(2), atol=1e-4, rtol=0)
        torch.testing.assert_close(known.denormalized(normal), RANDOM)

    def test_some_trajectories_may_be_enough(self):
        some = Statistics.of(RANDOM_CHOSEN, at_most=2)
        torch.testing.assert_close(some.mean, RANDOM[[0, 2]].mean(dim=(0, 1, 3)))
        assert some.condition_mean.item() == 2

    def test_a_constant_channel_stays_finite(self):
        chosen = [(InMemory(torch.ones(1, 3, 1, 4), torch.zeros(1, 1), fields=("a",)), 0)]
        assert Windows(chosen, statistics=Statistics.of(chosen), inputs=1, targets=1)[0][0].eq(0).all()
