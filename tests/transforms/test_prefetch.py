from collections import UserDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch import nn

from lightning_ups.transforms.prefetch import CopiesAhead, Lane, lane_for, tensors_in
from tests.slow_lane import POISON, SlowLane

CPU = torch.device("cpu")


def copies(**options):
    lane = SlowLane(**options)
    return lane, CopiesAhead(lane, min_bytes=1)


def moved(batch):
    """Move ``batch`` as Lightning does."""
    return LightningDataModule().transfer_batch_to_device(batch, CPU, 0)


def transferred(ahead, *batches):
    found = []
    for batch in batches:
        with ahead.transfer():
            found.append(batch.to(CPU, non_blocking=True))
    return found


def rows(number, *shape):
    return torch.full(shape or (2, 3), float(number))


def test_the_first_batch_is_copied_as_ever_and_the_next_beside_the_step():
    lane, ahead = copies()
    first, second = rows(1), rows(2)
    assert transferred(ahead, first)[0] is first
    assert lane.said == ["memory"]
    (found,) = transferred(ahead, second)
    assert found is not second
    assert torch.equal(found, second)
    assert lane.said == ["memory", "copy", "join", "memory"]
    assert (ahead.counts.plain, ahead.counts.beside) == (1, 1)


def test_a_batch_that_is_known_is_copied_ahead_of_its_transfer():
    lane, ahead = copies()
    batches = [{"x": rows(n), "y": rows(-n, 4)} for n in range(3)]
    with ahead.transfer():
        moved(batches[0])
    ahead.start(batches[1])
    ahead.start(batches[2])  # one is on its way
    assert lane.said == ["memory", "memory", "copy", "copy"]
    with ahead.transfer():
        found = moved(batches[1])
    assert [said for said in lane.said[4:] if said != "wait"] == ["join", "join", "memory", "memory"]
    assert all(torch.equal(found[name], batches[1][name]) and found[name] is not batches[1][name] for name in "xy")
    assert (ahead.counts.ahead, ahead.counts.beside, ahead.counts.unused) == (2, 0, 0)


def test_a_batch_of_other_shapes_is_copied_ahead_and_not_beside():
    _, ahead = copies()
    transferred(ahead, rows(1))
    other = rows(2, 5)
    assert transferred(ahead, other)[0] is other
    assert ahead.counts.plain == 2
    third = rows(3, 7)
    ahead.start(third)
    assert torch.equal(transferred(ahead, third)[0], third)
    assert ahead.counts.ahead == 1


def test_no_more_than_one_batch_is_kept_ready():
    _, ahead = copies()
    transferred(ahead, *(rows(n) for n in range(6)))
    assert sum(len(free) for free in ahead._free.values()) == 1
    transferred(ahead, rows(0, 9))
    assert [kind[0] for kind in ahead._free] == [(9,)]


def test_strides_are_those_of_a_plain_copy():
    for source in (torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.rand(2, 1, 3)):
        _, ahead = copies()
        found = transferred(ahead, source, source.clone())[1]
        assert found.stride() == source.stride()
    _, ahead = copies()
    transferred(ahead, torch.rand(4, 6)[:, ::2], torch.rand(4, 6)[:, ::2])  # whose strides a copy changes
    assert (ahead.counts.plain, ahead.counts.beside) == (0, 0)


@pytest.mark.parametrize(
    "leave",
    [
        lambda x: x.to(torch.float64),
        lambda x: x.to(CPU, torch.float64),
        lambda x: x.to(CPU, copy=True),
        lambda x: x.to(rows(1)),
        lambda x: x.to("meta"),
        lambda x: nn.Parameter(x).to(CPU),
        lambda x: x.clone().requires_grad_().to(CPU),
        lambda x: x + 1,
    ],
)
def test_what_does_more_than_move_a_tensor_is_left_alone(leave):
    _, ahead = copies()
    for _ in range(2):
        with ahead.transfer():
            found = leave(rows(1))
    expected = leave(rows(1))
    assert (found.dtype, found.device) == (expected.dtype, expected.device)
    assert (ahead.counts.plain, ahead.counts.beside) == (0, 0)


@pytest.mark.parametrize("move", [lambda x: x.to("cpu"), lambda x: x.to(device="cpu"), lambda x: x.to(CPU)])
def test_whoever_waits_for_a_copy_may_write_to_its_source(move):
    lane, ahead = copies()
    with ahead.transfer():
        move(rows(1))
    source = rows(2)
    with ahead.transfer():
        found = move(source)
    assert lane.said[-2:] == ["wait", "memory"]
    source.zero_()
    assert torch.equal(found, rows(2))


def test_small_tensors_and_foreign_devices_are_left_alone():
    lane = SlowLane()
    ahead = CopiesAhead(lane, min_bytes=rows(1).nbytes)
    transferred(ahead, rows(1, 5), rows(1, 5))
    assert lane.said == []
    with ahead.transfer():
        assert rows(1).to("meta").device.type == "meta"
    assert lane.said == []


def test_a_tensor_that_is_moved_twice_is_two():
    _, ahead = copies()
    source = rows(3)
    transferred(ahead, rows(1))
    with ahead.transfer():
        first, second = source.to(CPU), source.to(CPU)
    assert first is not source
    assert second is source
    assert torch.equal(first, source)


def test_a_tensor_that_is_in_a_batch_twice_leaves_no_copy_on_its_way():
    lane, ahead = copies()
    source = rows(3)
    ahead.start({"tokens": source, "labels": source})
    with ahead.transfer():
        found = moved({"tokens": source, "labels": source})
    assert torch.equal(found["tokens"], source)
    assert torch.equal(found["labels"], source)
    assert lane.open == {}, "a copy would write to memory that nobody holds"


def test_what_nobody_asks_for_is_given_up_and_not_copied_ahead_again():
    lane, ahead = copies()
    for n in range(3):
        batch = [rows(n), rows(n, 4)]
        ahead.start(batch)
        with ahead.transfer():
            found = batch[1].to(CPU, non_blocking=True)
        assert torch.equal(found, batch[1])
    assert lane.said.count("give up") == 1
    assert (ahead.counts.unused, ahead.counts.ahead) == (1, 3)
    assert lane.open == {}


def test_what_is_not_pinned_is_not_copied_ahead():
    lane, ahead = copies(pinned=False)
    transferred(ahead, rows(1))
    ahead.start(rows(2))
    assert lane.said == ["memory"]
    assert torch.equal(transferred(ahead, rows(2))[0], rows(2))
    assert ahead.counts.unpinned == 2


def test_an_exception_gives_up_what_is_on_its_way():
    lane, ahead = copies()
    transferred(ahead, rows(1))
    ahead.start([rows(2), rows(2, 4)])
    with pytest.raises(KeyError), ahead.transfer():
        raise KeyError
    assert lane.said.count("give up") == 2
    assert lane.open == {}
    assert transferred(ahead, source := rows(3))[0] is source  # nothing is ready


def test_code_outside_a_transfer_is_left_alone():
    _, ahead = copies()
    transferred(ahead, rows(1))
    source = rows(2)
    ahead.start(source)
    assert source.to(CPU) is source


def test_a_lane_of_tests_shows_who_reads_too_early():
    lane, ahead = copies()
    transferred(ahead, rows(1))
    ahead.start(rows(2))
    (target,) = (copy[0] for copy in lane.open.values())
    assert target.unique().tolist() == pytest.approx([POISON])


@dataclass
class Record:
    image: torch.Tensor
    name: str
    rest: list


Pair = namedtuple("Pair", "a b")


def test_tensors_are_found_in_what_a_loader_may_give():
    t = [rows(n) for n in range(6)]
    batch = {
        "a": t[0],
        "b": [Pair(t[1], 2), UserDict(x=t[2])],
        "c": Record(t[3], "name", [t[4]]),
        "d": object(),
        "e": t[5],
    }
    assert all(a is b for a, b in zip(tensors_in(batch), t, strict=True))
    assert list(tensors_in(Record)) == []


def test_a_cpu_needs_no_second_stream():
    assert lane_for(CPU) is None


@pytest.mark.gpu
class TestOnAGpu:
    def test_a_copy_runs_beside_a_long_kernel_and_training_waits_for_it(self):
        lane = lane_for(torch.device("cuda"))
        assert isinstance(lane, Lane)
        ahead = CopiesAhead(lane, min_bytes=1)
        first, second = (torch.rand(1 << 22).pin_memory() for _ in range(2))
        torch.empty(1 << 28, dtype=torch.uint8, device="cuda")  # kept by the allocator, which need not ask the driver
        with ahead.transfer():
            first.to("cuda", non_blocking=True).double().sum()  # loads its kernels, which may wait for the device
        torch.cuda.synchronize()
        torch.cuda._sleep(1_000_000_000)  # half a second of the step before
        queued = torch.cuda.current_stream().record_event()
        ahead.start(second)
        lane._stream.synchronize()
        assert not queued.query(), "the copy was made while the step before ran"
        with ahead.transfer():
            found = second.to("cuda", non_blocking=True)
        sum_ = found.double().sum()
        assert queued.query() is False, "the host waited for nothing"
        assert sum_.item() == pytest.approx(second.double().sum().item())
        assert torch.equal(found.cpu(), second)

    def test_memory_that_work_still_uses_is_not_written_to(self):
        ahead = CopiesAhead(lane_for(torch.device("cuda")), min_bytes=1)
        batches = [torch.full((1 << 22,), float(n)).pin_memory() for n in range(8)]
        sums = []
        for n, batch in enumerate(batches):
            with ahead.transfer():
                found = batch.to("cuda", non_blocking=True)
            torch.cuda._sleep(20_000_000)
            if n + 1 < len(batches) and n % 2:
                ahead.start(batches[n + 1])
            sums.append(found.double().mean())
            scratch = torch.empty_like(found).fill_(-1.0)  # takes what is free in the order of training
            del found, scratch
        assert [s.item() for s in sums] == [float(n) for n in range(8)]
        assert ahead.counts.ahead == 3
        assert ahead.counts.plain == 1
