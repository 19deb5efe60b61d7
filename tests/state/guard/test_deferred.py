import pytest
import torch

from lightning_ups.state.guard.deferred import Deferred


def test_values_are_read_a_fixed_number_of_steps_late():
    queue, seen = Deferred(late=2), []
    for step in range(5):
        queue.push(torch.tensor([float(step)]), step)
        seen.append([*queue.due()])
    assert seen == [[], [], [([0.0], 0)], [([1.0], 1)], [([2.0], 2)]]
    assert [*queue.rest()] == [([3.0], 3), ([4.0], 4)]


def test_without_delay_they_are_read_at_once():
    queue = Deferred(late=0)
    queue.push(torch.tensor([1.0]), "a")
    assert [*queue.due()] == [([1.0], "a")]


def test_what_is_forgotten_is_never_read():
    queue = Deferred(late=1)
    queue.push(torch.tensor([1.0]), "a")
    queue.forget()
    assert [*queue.rest()] == []


@pytest.mark.gpu(count=1)
def test_nobody_waits_for_the_device():
    queue, a = Deferred(late=1), torch.randn(4096, 4096, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            a = (a @ a).clamp(-1, 1)
        queue.push(a[0, :2], "a")
        assert [*queue.due()] == []
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert next(queue.rest())[1] == "a"
