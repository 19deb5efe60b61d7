import io
import itertools
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from lightning_ups._compat.torch.tensors import pinned as pinned_module
from lightning_ups.state.checkpoint.checksums import RecordReader
from lightning_ups.state.checkpoint.io import lanes as lanes_module
from lightning_ups.state.checkpoint.io.lanes import (
    Lane,
    Lanes,
    bytes_of,
    lanes_by_default,
    on_this_gpu,
    spread,
    wait_for_devices,
)


class Indirect(Lane):
    """A lane that uses its buffers for memory of the host, too, as it does for a GPU's."""

    def _direct(self, row):
        return False


def reader_of(content, noted=lambda room, place: None):
    """Return a reader of bytes without checksums, which calls ``noted`` after each read."""

    class Noted(RecordReader):
        def _read(self, room, place):
            super()._read(room, place)
            noted(room, place)

    return Noted(io.BytesIO(content), offset=0, record=None, name="file")


SIZES = [0, 1, 7, 8, 9, 16, 17, 40]


@pytest.mark.parametrize("size", SIZES)
def test_all_bytes_pass_through_two_buffers_in_order(size):
    source, lane = torch.randint(0, 256, (size,), dtype=torch.uint8), Indirect(piece=8)
    pieces = [bytes(piece.data) for piece in lane.pieces(source)]
    assert b"".join(pieces) == source.numpy().tobytes()
    assert all(len(piece) <= 8 for piece in pieces)
    target = torch.zeros_like(source)
    lane.fill(target, reader_of(source.numpy().tobytes()), 0)
    assert torch.equal(target, source)
    lane.close()


def test_a_piece_stays_while_the_next_one_comes():
    """The device fills one buffer while the file is written from the other."""
    source, lane = torch.arange(40, dtype=torch.uint8), Indirect(piece=8)
    pieces = lane.pieces(source)
    first = next(pieces)
    ahead = lane._buffers[source.device][1].memory[:8].tolist()
    assert ahead == list(range(8, 16)), "the next one is under way"
    assert bytes(first.data) == bytes(range(8))


def test_memory_of_the_host_is_not_copied():
    source = torch.arange(100, dtype=torch.uint8)
    (piece,) = Lane().pieces(source)
    assert torch.frombuffer(piece.data, dtype=torch.uint8).data_ptr() == source.data_ptr()
    addresses = []
    reader = reader_of(
        bytes(100), lambda room, _: addresses.append(torch.frombuffer(room, dtype=torch.uint8).data_ptr())
    )
    Lane().fill(source, reader, 0)
    assert addresses == [source.data_ptr()]


@pytest.mark.gpu(count=1)
def test_bytes_of_a_gpu_pass_through_pinned_memory():
    source = torch.randint(0, 256, (1000,), dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    lane = Lane(piece=64)
    content = b"".join(bytes(piece.data) for piece in lane.pieces(source))
    assert content == source.cpu().numpy().tobytes()
    assert all(buffer.memory.is_pinned() for buffer in lane._buffers[source.device])
    target = torch.zeros_like(source)
    torch.cuda.synchronize()
    lane.fill(target, reader_of(content), 0)
    lane.settle()
    assert torch.equal(target, source)
    lane.close()


def test_memory_that_cannot_be_pinned_is_used_as_it_is(monkeypatch):
    def refuse(nbytes):
        raise RuntimeError("CUDA could not pin 1 MiB.")

    monkeypatch.setattr(lanes_module, "pinned", refuse)
    with pytest.warns(UserWarning, match="could not pin 1 MiB.*which is slower"):
        pieces = [bytes(piece.data) for piece in Indirect(piece=8).pieces(torch.ones(9, dtype=torch.uint8))]
    assert b"".join(pieces) == b"\1" * 9


def test_parts_of_equal_weight():
    parts = spread(range(100), nbytes=lambda n: n, parts=4)
    assert sorted(itertools.chain(*parts)) == list(range(100))
    assert max(map(sum, parts)) - min(map(sum, parts)) < 100
    assert spread([5], nbytes=int, parts=3) == [[5]]
    assert spread([], nbytes=int, parts=3) == []
    assert len(spread([0, 0, 0], nbytes=int, parts=3)) == 3, "what has no bytes is spread as well"


def test_all_work_at_once_and_the_first_error_is_raised_when_all_have_ended():
    barrier, ended = threading.Barrier(3, timeout=60), []

    def work(lane, number, part):
        barrier.wait()
        ended.append(number)
        if number == 1:
            raise OSError(part)

    with pytest.raises(OSError, match="b"):
        Lanes(3).run(work, ["a", "b", "c"])
    assert sorted(ended) == [0, 1, 2]


@contextmanager
def interrupts():
    """Give a function by which a thread interrupts the main one, as Ctrl-C does, and sees that it has."""
    count, main = [], threading.main_thread().ident

    def handle(number, frame):
        count.append(number)
        raise KeyboardInterrupt

    def interrupt():
        before = len(count)
        signal.pthread_kill(main, signal.SIGUSR1)
        while len(count) == before:
            time.sleep(0.001)

    stock = signal.signal(signal.SIGUSR1, handle)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGUSR1, stock)


def buffers_of(lane, *, piece=8):
    lane._piece = piece
    return [buffer.memory.data_ptr() for buffer in lane._both(torch.device("cpu"))]


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("main_is", ["at work", "waiting"])
def test_an_interrupt_comes_out_when_all_have_ended_and_their_lanes_are_used_no_more(monkeypatch, main_is, times):
    monkeypatch.setattr(Lane, "_direct", lambda self, row: False)
    pieces, ended, used, source = [], threading.Event(), [], torch.zeros(8 * 5000, dtype=torch.uint8)
    interrupted = threading.Event()

    def work(lane, number, _):
        used.append(lane)
        buffers_of(lane)
        if number == 0 and main_is == "at work":
            interrupted.wait(60)
        if number == 0:
            return
        try:
            time.sleep(0.1)
            for _ in range(times):
                interrupt()
                time.sleep(0.05)
            interrupted.set()
            pieces.extend(time.sleep(0.002) for _ in lane.pieces(source))
        finally:
            time.sleep(0.1)
            ended.set()

    lanes = Lanes(2)
    with interrupts() as interrupt:
        with pytest.raises(KeyboardInterrupt):
            lanes.run(work, ["a", "b"])
        assert ended.is_set(), "what has not ended would share the lanes with the next"
    assert len(pieces) < 100, "it has stopped early"
    assert all(not lane._buffers for lane in used), "given back"
    again = []
    lanes.run(lambda lane, *_: again.append(lane), ["a", "b"])
    assert not {*again} & {*used}


def test_lanes_are_kept_when_all_went_well():
    lanes, used = Lanes(2), []
    for _ in range(2):
        lanes.run(lambda lane, *_: used.append(lane), ["a", "b"])
    assert len({*used}) == 2


def test_lanes_at_work_are_nobody_elses():
    """A save that was abandoned may still be at work when the next one begins."""
    lanes, used = Lanes(1), []

    def work(lane, *_):
        used.append(lane)
        if len(used) == 1:
            lanes.run(work, ["b"])
            lanes.close()

    lanes.run(work, ["a"])
    assert len({*used}) == 2


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), KeyboardInterrupt()], ids=repr)
def test_a_thread_that_cannot_be_started_or_is_interrupted_as_it_is(monkeypatch, error):
    start, started, ended = threading.Thread.start, [], []

    def limited(self):
        started.append(self)
        if isinstance(error, KeyboardInterrupt) or len(started) < 2:
            start(self)
        if len(started) == 2:
            raise error

    def work(lane, number, _):
        begun.set()
        time.sleep(0.2)
        ended.append(number)

    begun = threading.Event()
    monkeypatch.setattr(threading.Thread, "start", lambda self: (limited(self), begun.wait(60)))
    with pytest.raises(type(error)):
        Lanes(4).run(work, ["a", "b", "c", "d"])
    found = [*ended]
    assert 1 in found
    assert 3 not in found
    time.sleep(0.3)
    assert ended == found, "none was at work any more"


def test_an_error_stops_the_others_and_an_interrupt_is_not_lost_beside_it():
    all_here, failed, pieces = threading.Barrier(3, timeout=60), threading.Event(), []

    def work(lane, number, _):
        all_here.wait()
        if number == 1:
            failed.set()
            raise OSError("full")
        failed.wait(60)
        time.sleep(0.05)
        if number == 2:
            pieces.extend(lane.pieces(torch.zeros(9, dtype=torch.uint8)))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Lanes(3).run(work, ["a", "b", "c"])
    assert not pieces


@pytest.mark.parametrize("lane", [Lane, Indirect])
def test_a_lane_stops_between_pieces(lane):
    lane, row = lane(piece=8), torch.zeros(40, dtype=torch.uint8)
    pieces, places = lane.pieces(row), []
    next(pieces)
    lane.stop()
    with pytest.raises(lanes_module._Stopped):
        next(pieces)
    lane.close()
    lane = type(lane)(piece=8)

    def noted(_, place):
        places.append(place)
        if place == 8:
            lane.stop()

    with pytest.raises(lanes_module._Stopped):
        lane.fill(row, reader_of(bytes(40), noted), 0)
    assert places == [0, 8]


class Cuda:
    """Pretends that there are GPUs, and notes on which one a thread is as it calls CUDA; a new one is on the first."""

    def __init__(self, monkeypatch):
        self.calls, self._here = [], threading.local()
        runtime = SimpleNamespace(cudaHostRegister=self._register, cudaHostUnregister=self._unregister)
        monkeypatch.setattr(pinned_module, "_runtime", lambda: runtime)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "device", self.device)
        monkeypatch.setattr(torch.cuda, "stream", self.stream)
        monkeypatch.setattr(torch.cuda, "Stream", self.make_stream)

    @property
    def current(self):
        return getattr(self._here, "device", 0)

    @contextmanager
    def device(self, device):
        before, self._here.device = self.current, device if isinstance(device, int) else device.index
        yield
        self._here.device = before

    @contextmanager
    def stream(self, stream):
        self.note("enter stream")
        yield
        self.note("leave stream")

    def make_stream(self, device):
        self.note("make stream")
        return SimpleNamespace(synchronize=lambda: self.note("wait"))

    def note(self, name):
        self.calls.append((name, threading.current_thread() is threading.main_thread(), self.current))

    def _register(self, *_):
        self.note("pin")
        return 0

    def _unregister(self, *_):
        self.note("unpin")
        return 0


def test_threads_call_cuda_on_the_gpu_of_their_caller(monkeypatch):
    """Another would get a context of every rank, of some hundred megabytes each: the first of the machine."""
    cuda = Cuda(monkeypatch)
    rows, lanes = [torch.zeros(20, dtype=torch.uint8) for _ in range(3)], Lanes(3)
    monkeypatch.setattr(Lane, "_direct", lambda self, row: False)
    both, gpu = Lane._both, torch.device("cuda", 3)
    monkeypatch.setattr(Lane, "_both", lambda self, device: both(self, gpu))

    def work(lane, number, row):
        list(lane.pieces(row))
        lane.fill(row, reader_of(bytes(20)), 0)
        cuda.note("other")

    with cuda.device(3):
        lanes.run(work, rows)
    lanes.close()  # by whoever it is
    names = {"pin", "unpin", "make stream", "enter stream", "leave stream", "wait", "other"}
    assert {name for name, _, _ in cuda.calls} == names
    assert {main for _, main, _ in cuda.calls} == {True, False}
    assert {device for name, _, device in cuda.calls if name != "wait"} == {3}
    assert {device for name, main, device in cuda.calls if not main} == {3}


def test_buffers_are_on_the_gpu_of_the_tensor_even_if_that_is_not_the_callers(monkeypatch):
    cuda = Cuda(monkeypatch)
    buffer = lanes_module._Buffer(8, torch.device("cuda", 2))
    buffer.fetch(torch.ones(8, dtype=torch.uint8))
    pinned_module.unpin(buffer.memory)
    assert {device for _, _, device in cuda.calls} == {2}
    assert cuda.current == 0


def test_where_cuda_has_not_begun_no_gpu_is_chosen(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda _: pytest.fail("chosen"))
    with on_this_gpu()():
        pass


ON_THE_SECOND = """
import sys, torch
from pathlib import Path
from lightning_ups.state.checkpoint.loading import load_weights
from lightning_ups.state.checkpoint.saver import Saver
torch.cuda.set_device(1)
module, path = torch.nn.Linear(2048, 2048, device="cuda"), Path(sys.argv[1])
saver = Saver(asynchronous=False, threads=3)
saver.save({"state_dict": module.state_dict()}, files={}, path=path / "a")
saver.close()
load_weights(module, path / "a")
held = [torch._C._cuda_hasPrimaryContext(index) for index in (0, 1)]
assert held == [False, True], held
"""


@pytest.mark.gpu(count=2)
def test_saving_and_loading_on_the_second_gpu_leaves_the_first_alone(tmp_path):
    subprocess.run([sys.executable, "-c", ON_THE_SECOND, str(tmp_path)], check=True, timeout=300)


def test_each_gpu_is_waited_for_once(monkeypatch):
    waited = []
    stream = lambda device: SimpleNamespace(synchronize=lambda: waited.append(device))  # noqa: E731
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    devices = [("cuda:1", True), ("cpu", False), ("cuda:0", True), ("cuda:1", True)]
    wait_for_devices(SimpleNamespace(device=torch.device(name), is_cuda=cuda) for name, cuda in devices)
    assert sorted(map(str, waited)) == ["cuda:0", "cuda:1"]


def test_nothing_to_do():
    Lanes().run(lambda *_: pytest.fail("called"), [])


def test_small_states_take_one_lane_and_large_ones_no_more_than_the_rank_may():
    assert Lanes().count([1000]) == 1
    assert Lanes().count([10**12]) == lanes_by_default() <= 8
    assert Lanes().count([1000] * 10**6) == 1, "many small ones would only wait for one another in Python"
    assert Lanes(5).count([1]) == 5


@pytest.mark.parametrize(
    ("cores", "ranks", "gpus", "lanes"), [(64, 32, 4, 8), (16, 1, 1, 8), (2, 4, 0, 1), (8, 4, 8, 2)]
)
def test_ranks_of_one_machine_share_its_cores(monkeypatch, cores, ranks, gpus, lanes):
    monkeypatch.setattr(lanes_module.os, "sched_getaffinity", lambda _: range(cores), raising=False)
    monkeypatch.setattr(lanes_module.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(lanes_module.dist, "get_world_size", lambda: ranks)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert lanes_by_default() == lanes


def test_which_tensors_are_one_row_of_bytes():
    weight = torch.randn(4, 6)
    for dense in (weight, weight.T, weight[1:3], torch.tensor(1.0), weight[:0], weight[:, None], weight.bool()):
        row = bytes_of(dense)
        assert row.nbytes == dense.nbytes
        assert row.data_ptr() == dense.data_ptr() or not dense.numel()
    complex_one = torch.randn(3, dtype=torch.complex64)
    for other in (
        weight[:, :2],
        weight[:1].expand(3, 6),
        complex_one.conj(),
        complex_one.conj().imag,
        weight.to_sparse(),
    ):
        assert bytes_of(other) is None
