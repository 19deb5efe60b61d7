import numpy
import pytest
import torch

from lightning_ups.data import RandomTokens


def make(**options):
    return RandomTokens(**{"vocab_size": 1000, "seq_len": 64, "batch_size": 8, **options})


def test_batches_have_the_shape_and_one_token_more():
    batch = next(iter(make().train_dataloader()))
    assert batch.shape == (8, 65)
    assert batch.dtype == torch.int64


def test_tokens_are_uniform():
    tokens = torch.cat([*make(vocab_size=10, num_samples=800).train_dataloader()]).flatten()
    torch.testing.assert_close(tokens.bincount() / len(tokens), torch.full((10,), 0.1), atol=0.006, rtol=0)


def test_a_sample_depends_on_its_number_and_the_seed_alone():
    one, other = make(num_samples=16), make(num_samples=16, batch_size=4)
    assert torch.equal(torch.cat([*one.train_dataloader()]), torch.cat([*other.train_dataloader()]))
    assert not torch.equal(next(iter(one.train_dataloader())), next(iter(make(seed=1).train_dataloader())))
    first = torch.cat([*one.train_dataloader()])
    assert len({tuple(row) for row in first.tolist()}) == 16


def test_validation_has_samples_of_its_own():
    data = make(num_samples=16)
    seen = {tuple(row) for batch in data.train_dataloader() for row in batch.tolist()}
    held_out = [tuple(row) for batch in data.val_dataloader() for row in batch.tolist()]
    assert len(held_out) == 16
    assert not seen & {*held_out}


def test_numpy_integers_are_accepted():
    numbers = dict.fromkeys(("vocab_size", "seq_len", "batch_size", "num_samples"), numpy.int64(4))
    (batch,) = RandomTokens(**numbers, seed=numpy.int64(3)).train_dataloader()
    (other,) = RandomTokens(**{name: int(number) for name, number in numbers.items()}, seed=3).train_dataloader()
    assert torch.equal(batch, other)


@pytest.mark.gpu
def test_batches_are_pinned_for_a_gpu(tmp_path):
    from lightning.pytorch import Trainer

    data = make()
    data.trainer = Trainer(accelerator="gpu", devices=1, logger=False, default_root_dir=tmp_path)
    assert next(iter(data.train_dataloader())).is_pinned()
