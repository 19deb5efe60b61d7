import torch

from lightning_ups.insight.memory.batches import batch_size, resized, sequence_length


def test_token_batches():
    batch = {"tokens": torch.zeros(4, 9, dtype=torch.long), "mask": torch.ones(4, 9), "label": torch.zeros(4), "n": 3}
    assert (batch_size(batch), sequence_length(batch)) == (4, 9)
    other = resized(batch, samples=6, tokens=17)
    assert [tuple(other[name].shape) for name in ("tokens", "mask", "label")] == [(6, 17), (6, 17), (6,)]
    assert other["n"] == 3
    assert other["tokens"].dtype is torch.long


def test_batches_without_a_sequence():
    images = (torch.zeros(8, 3, 16, 16), torch.zeros(8, dtype=torch.long))
    assert (batch_size(images), sequence_length(images)) == (8, None)
    assert resized(images, samples=2)[0].shape == (2, 3, 16, 16)
    assert batch_size("nothing") is None
