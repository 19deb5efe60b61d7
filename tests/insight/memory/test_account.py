import pytest
import torch

from lightning_ups._compat.torch.fake_tensors import fake_mode
from lightning_ups.insight.memory.account import GIB, Ledger, allocated, readable

KB = 1024


def floats(kilobytes):
    return torch.empty(kilobytes * 256)


@pytest.fixture
def ledger():
    ledger = Ledger()
    with fake_mode(), ledger:
        yield ledger


def test_live_memory_is_counted_until_it_is_freed(ledger):
    a = floats(1)
    b = a + 1
    assert ledger.total == 2 * KB
    del a
    assert ledger.total == KB
    del b
    assert ledger.total == 0
    assert ledger.peak.total == 2 * KB


def test_views_are_no_memory(ledger):
    a = floats(4)
    views = [a[:5], a.view(-1, 2), a.t(), a.detach()]
    assert ledger.total == 4 * KB
    del a
    assert ledger.total == 4 * KB  # they hold it
    del views
    assert ledger.total == 0


def test_in_place_operators_take_no_memory(ledger):
    a = floats(1)
    a.add_(1)
    torch._foreach_mul_([a], 2)
    assert ledger.total == KB
    assert ledger.peak.total == KB


def test_kinds_and_owners(ledger):
    weight, buffer = floats(1), floats(2)
    ledger.claim([weight], "parameters", "a")
    ledger.claim([buffer, buffer.view(2, -1)], "buffers")  # once
    ledger.start("forward", "a")
    saved = weight * 2
    ledger.start("backward", "b")
    gradient = saved * 2
    moment = ledger.now()
    assert moment.held == {
        ("parameters", "a"): KB,
        ("buffers", ""): 2 * KB,
        ("activations", "a"): KB,
        ("temporaries", "b"): KB,
    }
    assert moment.by_kind() == {"buffers": 2 * KB, "parameters": KB, "activations": KB, "temporaries": KB}
    assert moment.by_owner("activations", "temporaries") == {"a": KB, "b": KB}
    assert moment.of("buffers", "parameters") == 3 * KB
    assert gradient.shape == weight.shape


def test_the_peak_of_each_phase_and_what_was_alive_then(ledger):
    ledger.start("forward", "block")
    a = floats(1)
    torch.add(a, 1)
    ledger.start("backward", "block")
    b = floats(8)
    del a
    ledger.start("optimizer")
    assert ledger.peaks["forward"].total == 2 * KB
    assert ledger.peaks["backward"].total == 9 * KB
    assert ledger.peaks["optimizer"].total == 8 * KB
    assert (ledger.peak.phase, ledger.peak.place) == ("backward", "block")
    ledger.forget_peaks()
    assert ledger.peaks["optimizer"].total == 8 * KB
    assert "backward" not in ledger.peaks
    assert b.shape == (2048,)


def test_memory_that_is_not_fixed_has_its_own_peak(ledger):
    ledger.start("backward", "x")
    temporary = floats(4)
    del temporary
    gradient = floats(6)
    ledger.claim([gradient], "gradients")
    again = floats(3)
    assert ledger.peak.total == 9 * KB
    # Of what is not sharded with the parameters there was most while the gradient was a temporary still.
    assert ledger.loose["backward", "x"].of("temporaries") == 6 * KB
    assert again.shape == (768,)


def test_a_pause(ledger):
    with ledger.paused():
        unseen = floats(1)
        with ledger.resumed():
            seen = floats(2)
    assert ledger.total == 2 * KB
    ledger.enter(unseen)
    assert ledger.total == 3 * KB
    assert seen.shape == (512,)


def test_memory_that_is_left_out_and_views_of_it(ledger):
    host = floats(4)
    ledger.leave_out(host)
    assert ledger.total == 0
    view = host[:100].view(-1, 2)
    del host
    assert ledger.total == 0
    del view
    again = floats(4)  # whose memory may be at the same place
    assert ledger.total == 4 * KB
    del again


def test_tied_tensors_are_counted_once():
    a, ledger = torch.zeros(300), Ledger()
    ledger.claim([a, a.view(3, 100), a[:2]], "parameters")
    assert ledger.total == allocated(1200)


def test_a_wrapper_subclass_has_the_memory_of_its_tensors():
    from torchao.optim.subclass_8bit import OptimState8bit

    state = OptimState8bit.zeros((1024,), block_size=256)
    ledger = Ledger()
    ledger.claim([state], "optimizer state")
    codes, scale, table = KB, 512, KB  # a byte each; 4 numbers; 256 of float32
    assert ledger.total == codes + scale + table


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (3.25 * GIB, "3.2 GiB"),
        (0.5 * GIB, "0.50 GiB"),
        (50 * 2**20, "50 MiB"),
        (3 * 2**19, "1.5 MiB"),
        (-512, "0.0 MiB"),
    ],
)
def test_sizes_for_people(size, text):
    assert readable(size) == text
