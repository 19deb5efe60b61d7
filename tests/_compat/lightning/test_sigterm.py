import signal
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_ups._compat.lightning.sigterm import SigtermPoll
from tests.toys import trainer


def polled(tmp_path, who):
    loop = SimpleNamespace()
    connector = SimpleNamespace(received_sigterm=False)
    fake = SimpleNamespace(
        world_size=2,
        fit_loop=SimpleNamespace(epoch_loop=loop),
        _signal_connector=connector,
        strategy=SimpleNamespace(launcher=None),
    )
    poll = SigtermPoll(fake, every=3)
    with poll.installed():
        for step in range(1, 20):
            if step == 4 and dist.get_rank() == who:
                connector._sigterm_notifier_fn(signal.SIGTERM, None)
                assert not connector.received_sigterm  # nobody else knows yet
            try:
                loop._broadcast_sigterm_tensor()
            except SIGTERMException:
                break
    steps = [None] * 2
    dist.all_gather_object(steps, (step, connector.received_sigterm))
    return steps, vars(loop)


@pytest.mark.parametrize("who", [0, 1])
def test_every_rank_stops_at_the_same_step(ranks, tmp_path, who):
    steps, left = ranks(polled, tmp_path, who)
    assert steps == [(9, True), (9, True)]  # asked for at 4, sent at 6, read at 9
    assert left == {}


class Requeues(SimpleNamespace):
    def _slurm_sigusr_handler_fn(self, signum, _):
        self.said.append((self.batches.current.processed, signum))


def requeued(tmp_path, steps, every, accumulate):
    """Return at which steps ranks save that get their signals at ``steps``."""
    batches = SimpleNamespace(current=SimpleNamespace(processed=0))
    connector = Requeues(said=[], batches=batches)
    fit_loop = SimpleNamespace(
        epoch_loop=SimpleNamespace(batch_progress=batches),
        _should_accumulate=lambda: batches.current.processed % accumulate != 0,
    )
    fake = SimpleNamespace(
        world_size=2, fit_loop=fit_loop, _signal_connector=connector, strategy=SimpleNamespace(launcher=None)
    )
    with SigtermPoll(fake, every=every).installed():
        for step in range(20):
            batches.current.processed = step
            if step == steps[dist.get_rank()]:
                connector._slurm_sigusr_handler_fn(signal.SIGUSR1, None)
                assert not connector.said  # others are elsewhere
            fit_loop.epoch_loop._broadcast_sigterm_tensor()
    both = [None] * 2
    dist.all_gather_object(both, connector.said)
    return both, [name for name in vars(connector) if name.startswith("_")]


@pytest.mark.parametrize(
    ("steps", "accumulate", "saved"),
    [
        ((3, 3), 1, 7),  # sent by the poll before step 3, and read by that before step 7
        ((None, 4), 1, 11),
        ((3, 3), 5, 10),  # the step of an accumulation is over
        ((3, 5), 5, 10),  # and what came to the other rank meanwhile is about the same
    ],
)
def test_every_rank_is_requeued_once_and_at_the_same_step(ranks, tmp_path, steps, accumulate, saved):
    both, left = ranks(requeued, tmp_path, steps, 4, accumulate)
    assert both == [[(saved, signal.SIGUSR1)]] * 2
    assert left == []


def requeued_amid_a_poll(tmp_path):
    said, mark = [], torch.tensor

    def interrupted(*args, **kwargs):
        if torch.tensor is interrupted and not said:
            torch.tensor = mark
            connector._slurm_sigusr_handler_fn(signal.SIGUSR1, None)
        return mark(*args, **kwargs)

    batches = SimpleNamespace(current=SimpleNamespace(processed=0))
    connector = Requeues(said=said, batches=batches)
    loop = SimpleNamespace(batch_progress=batches)
    fit_loop = SimpleNamespace(epoch_loop=loop, _should_accumulate=lambda: False)
    fake = SimpleNamespace(
        world_size=2, fit_loop=fit_loop, _signal_connector=connector, strategy=SimpleNamespace(launcher=None)
    )
    with SigtermPoll(fake, every=2).installed():
        torch.tensor = interrupted
        for _ in range(6):
            loop._broadcast_sigterm_tensor()
    return said


def test_a_signal_that_comes_while_a_poll_is_sent_goes_with_the_next(ranks, tmp_path):
    assert ranks(requeued_amid_a_poll, tmp_path) == [(0, signal.SIGUSR1)]


def test_one_process_keeps_lightnings_own_way(tmp_path):
    lightning = trainer(tmp_path)
    with SigtermPoll(lightning, every=1).installed():
        assert "_broadcast_sigterm_tensor" not in vars(lightning.fit_loop.epoch_loop)


def marked(tmp_path, differs):
    fake = SimpleNamespace(world_size=2, strategy=SimpleNamespace(launcher=None))
    found = []
    poll = SigtermPoll(
        fake, every=2, mark=lambda: 7 + differs * dist.get_rank(), differ=lambda: found.append(poll._count)
    )
    for _ in range(5):
        poll.poll()
    poll.compare()
    return found


def test_a_mark_that_differs_is_found_at_the_next_poll_and_at_the_end(ranks, tmp_path):
    assert ranks(marked, tmp_path, 0) == []
    assert ranks(marked, tmp_path, 2**31) == [4, 5]
