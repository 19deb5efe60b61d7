import pytest
import torch

from lightning_ups._compat.pinned import PAGE, _check, own_pages, pinned, unpin


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
    with pytest.raises(RuntimeError, match=r"save synchronously \(async_save=False\)\.$"):
        _check(2, 2**20)


@pytest.mark.gpu(count=1)
def test_what_was_freed_can_be_pinned_again_and_small_pieces_share_no_page():
    for _ in range(20):  # the allocator hands out the same places again
        pieces = [pinned(100) for _ in range(8)]
        assert all(piece.is_pinned() for piece in pieces)
        del pieces


def test_two_buffers_share_no_page():
    pages = [own_pages(n) for n in (1, 4096, 5000, 10)]
    starts = [page.data_ptr() for page in pages]
    assert all(start % PAGE == 0 for start in starts)
    assert [page.nbytes for page in pages] == [PAGE, PAGE, 2 * PAGE, PAGE]
