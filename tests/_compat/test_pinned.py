import pytest
import torch

from lightning_ups._compat.pinned import _check, pinned, unpin


def test_memory_of_the_size_that_was_asked_for():
    memory = pinned(1000)
    assert memory.nbytes == 1000
    memory.fill_(3)
    assert memory.sum() == 3000
    unpin(memory)


def test_none_at_all():
    unpin(pinned(0))


@pytest.mark.gpu(count=1)
def test_it_is_pinned_where_there_is_a_gpu():
    memory = pinned(1000)
    assert memory.is_pinned()
    copied = torch.arange(250, dtype=torch.int32, device="cuda").view(torch.uint8)
    memory.copy_(copied, non_blocking=True)
    torch.cuda.synchronize()
    assert memory.view(torch.int32)[-1] == 249
    unpin(memory)
    assert not memory.is_pinned()


def test_an_error_of_cuda_is_told():
    with pytest.raises(RuntimeError, match=r"or save synchronously \(async_save=False\)\.$"):
        _check(2)
