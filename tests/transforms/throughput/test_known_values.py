"""What is known of tensors without data."""

import torch

from lightning_ups.transforms.throughput.known_values import KnownValues


def known(tensor):
    values = KnownValues()
    stand_in = torch.empty_like(tensor, device="meta")
    values.add(stand_in, tensor)
    return values, stand_in


def follow(values, func, *args, **kwargs):
    result = func(*args, **kwargs)
    values.follow(func, args, kwargs, result)
    return result


def test_what_is_computed_of_known_values_is_known():
    values, x = known(torch.tensor([3, 5]))
    mask = follow(values, torch.lt, follow(values, torch.arange, 6, device=x.device), follow(values, torch.max, x))
    assert torch.equal(values[mask], torch.arange(6) < 5)


def test_real_numbers_random_ones_and_large_tensors_are_not():
    values, x = known(torch.tensor([3, 5]))
    assert values[follow(values, torch.mul, x, 0.5)] is None
    assert values[follow(values, torch.randint_like, x, 9)] is None
    assert values[follow(values, torch.arange, 2**20 + 1, device="meta")] is None
    assert values[follow(values, torch.add, x, torch.empty(2, dtype=torch.long, device="meta"))] is None
    values, x = known(torch.tensor([0.5]))
    assert values[x] is None


def test_writing_is_followed_or_makes_all_unknown():
    values, x = known(torch.tensor([3, 5]))
    follow(values, torch.Tensor.add_, x, 1)
    follow(values, torch.Tensor.__setitem__, x, 0, 9)
    assert values[x].tolist() == [9, 6]
    follow(values, torch.Tensor.copy_, x, torch.empty(2, dtype=torch.long, device="meta"))
    assert values[x] is None


def test_the_users_tensor_stays_as_it_is():
    given = torch.tensor([3, 5])
    values, x = known(given)
    follow(values, torch.Tensor.zero_, x)
    assert given.tolist() == [3, 5]
