"""What is known of tensors without data."""

import pytest
import torch

from lightning_ups.insight.dry_run.known_values import KnownValues


def known(tensor):
    values = KnownValues()
    stand_in = torch.empty_like(tensor, device="meta")
    values.add(stand_in, tensor)
    return values, stand_in


def follow(values, func, *args, **kwargs):
    followed = values.can_follow(func, args, kwargs)
    result = func(*args, **kwargs)
    values.forget(func)
    if followed:
        values.follow(func, args, kwargs, result)
    return result


def test_results_of_known_values_are_known():
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


def test_writes_are_followed():
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


def unknown(dtype=torch.bool):
    return torch.empty(2, 3, dtype=dtype, device="meta")


WRITES = {
    "out": lambda values, x: follow(values, torch.lt, unknown(torch.long), unknown(torch.long), out=x),
    "a view": lambda values, x: follow(values, torch.Tensor.copy_, x[0], unknown()[0]),
    "foreach": lambda values, x: follow(values, torch._foreach_mul_, [x], [unknown()]),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writes_of_unknown_values_make_values_unknown(write):
    values, x = known(torch.zeros(2, 3, dtype=torch.bool))
    write(values, x)
    assert values[x] is None


def test_a_write_through_a_view_is_followed():
    values, x = known(torch.zeros(2, 3, dtype=torch.bool))
    for row, n in zip(follow(values, torch.Tensor.unbind, x), (1, 3), strict=True):
        follow(values, torch.Tensor.fill_, follow(values, torch.Tensor.__getitem__, row, slice(0, n)), True)
    assert values[x].tolist() == [[True, False, False], [True, True, True]]


def test_values_are_read_when_they_are_asked_for():
    given = torch.tensor([3, 5])
    values, x = known(given)
    assert not len(values._values)
    assert values[x].tolist() == [3, 5]
    values, x = known(given)
    x.add_(1)  # with nobody to follow it
    assert values[x] is None
    values, x = known(given)
    values.clear()
    assert values[x] is None
