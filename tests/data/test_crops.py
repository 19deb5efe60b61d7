import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_ups.data.crops import Crops, batches

TOKENS = torch.arange(100, dtype=torch.int16)


def test_a_batch_is_the_crops_asked_for_and_keeps_the_type():
    crops = Crops(TOKENS, starts=torch.tensor([3, 50, 95]), length=5)
    assert crops.__getitems__([2, 0]).tolist() == [[95, 96, 97, 98, 99], [3, 4, 5, 6, 7]]
    assert crops.__getitems__([2, 0]).dtype == torch.int16
    assert crops[1].tolist() == [50, 51, 52, 53, 54]
    assert len(crops) == 3


def test_random_crops_reach_both_ends_and_stay_inside():
    crops = Crops.random(TOKENS, length=5, count=5000, seed=0)
    found = crops.__getitems__(range(5000))
    assert (found.diff(dim=1) == 1).all()
    assert (found.min(), found.max()) == (0, 99)
    assert len(found[:, 0].unique()) == 96


def test_the_seed_decides_the_places():
    first, again, other = (Crops.random(TOKENS, length=5, count=50, seed=seed).starts for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_spread_crops_go_from_the_first_token_to_the_last():
    assert Crops.spread(TOKENS, length=10, count=4).starts.tolist() == [0, 30, 60, 90]


def loader(**options):
    crops = Crops(TOKENS, starts=torch.arange(96), length=5)
    return batches(crops, batch_size=10, pin_memory=False, **options)


def test_shuffled_epochs_differ_and_repeat_from_the_seed():
    def epochs(seed):
        training = loader(shuffle_seed=seed)
        return [torch.cat([*training])[:, 0].tolist() for _ in range(2)]

    first, second = epochs(0)
    assert len(set(first)) == 90  # nine whole batches, no crop twice
    assert first != second
    assert epochs(0) == [first, second]
    assert epochs(1) != [first, second]


def test_unshuffled_keeps_the_order_and_the_last_batch():
    found = [*loader()]
    assert [len(batch) for batch in found] == [10] * 9 + [6]
    assert torch.cat(found)[:, 0].tolist() == [*range(96)]


def test_a_batch_is_one_copy(monkeypatch):
    monkeypatch.setattr(Crops, "__getitem__", lambda *_: pytest.fail("crops are fetched one by one"))
    assert next(iter(loader())).shape == (10, 5)


def test_a_batch_is_copied_by_one_thread():
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            sizes.append(0 if func.is_view else result.numel())
            return result

    sizes = []
    crops = Crops(TOKENS, starts=torch.arange(96), length=5)
    with Seen():
        assert crops.__getitems__([2, 0, 7]).shape == (3, 5)
    assert max(sizes) <= 3, "the starts are torch's to look up, and the crops are not"


@pytest.mark.gpu
def test_batches_are_pinned_and_the_same():
    crops = Crops(TOKENS, starts=torch.arange(96), length=5)
    pinned, plain = ([*batches(crops, batch_size=10, pin_memory=pin)] for pin in (True, False))
    assert all(batch.is_pinned() for batch in pinned)
    assert torch.equal(torch.cat(pinned), torch.cat(plain))
