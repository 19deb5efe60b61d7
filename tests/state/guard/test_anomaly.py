import pytest
import torch

from lightning_ups.state.guard.anomaly import LossWatch, Verdict

NAN, INF = float("nan"), float("inf")


def judged(watch, *values):
    return [Verdict.of(watch.judge(torch.tensor([loss, 1.0])).tolist()) for loss in values]


def watch(**settings):
    return LossWatch(torch.device("cpu"), **({"window": 8, "least": 4} | settings))


def steady(number):
    return [1.0 + 0.1 * (-1) ** index for index in range(number)]


def test_what_is_not_finite_is_seen_at_once():
    first, second, third = judged(watch(), NAN, 1.0, INF)
    assert (first.nonfinite, second.nonfinite, third.nonfinite) == (True, False, True)
    assert (first.spike, third.spike) == (False, False)


def test_a_spike_stands_out_from_what_was_before():
    *calm, spike, after = judged(watch(), *steady(8), 3.0, 1.0)
    assert not any(verdict.spike for verdict in calm)
    assert (spike.spike, after.spike) == (True, False)
    assert spike.loss_limit == pytest.approx(1.0 + 6 * 0.1)


def test_nothing_is_a_spike_before_there_is_enough_to_compare():
    assert [verdict.spike for verdict in judged(watch(), 1.0, 1.0, 1.0, 50.0)] == [False] * 4
    assert judged(watch(), 1.0, 1.0, 1.0, 1.0, 50.0)[-1].spike


def test_a_fall_is_no_spike():
    assert not judged(watch(), *steady(8), 0.0, -5.0)[-1].spike


def test_rounding_of_a_constant_loss_is_no_spike():
    assert not judged(watch(), *[2.0] * 8, 2.000001)[-1].spike


def test_a_spike_does_not_hide_the_next():
    assert [verdict.spike for verdict in judged(watch(), *steady(8), 1e6, 10.0)[-2:]] == [True, True]


def test_a_level_that_stays_becomes_usual():
    verdicts = judged(watch(), *steady(8), *[1.8] * 12)
    assert verdicts[8].spike
    assert not verdicts[-1].spike


def test_what_is_not_finite_does_not_poison_the_memory():
    verdicts = judged(watch(), *steady(8), NAN, INF, 1.0, 3.0)
    assert [verdict.spike for verdict in verdicts[-2:]] == [False, True]


def test_the_norm_is_watched_too():
    both = watch()
    for _ in range(6):
        both.judge(torch.tensor([1.0, 1.0]))
    verdict = Verdict.of(both.judge(torch.tensor([1.0, 9.0])).tolist())
    assert verdict.spike
    assert str(verdict).startswith("the gradients' norm is 9, a spike above 1.0")


@pytest.mark.gpu(count=1)
def test_the_host_reads_nothing():
    watched, values = LossWatch(torch.device("cuda"), window=8, least=2), torch.tensor([1.0, 2.0], device="cuda")
    watched.judge(values)
    torch.cuda.set_sync_debug_mode("error")
    try:
        verdicts = [watched.judge(values) for _ in range(10)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not Verdict.of(verdicts[-1].tolist()).spike


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([1, 0, NAN, 2.0, INF, INF], "the loss is nan"),
        ([1, 0, NAN, INF, INF, INF], "the loss is nan and the gradients' norm is inf"),
        ([0, 1, 9.0, 2.0, 3.0, INF], "the loss is 9, a spike above 3"),
        ([0, 0, 1.5, 2.0, 3.0, INF], "the loss is 1.5"),
    ],
)
def test_a_verdict_is_said_in_words(values, text):
    assert str(Verdict.of(values)) == text


def test_float64_is_judged_in_float64_from_the_first_value_in_it_on():
    watch = LossWatch(torch.device("cpu"), window=8, least=2)
    for value in (1.0, 2.0, 1.0):
        assert not Verdict.of(watch.judge(torch.tensor([value, value])).tolist()).nonfinite
    huge = Verdict.of(watch.judge(torch.tensor([1e40, 1.0], dtype=torch.float64)).tolist())
    assert (huge.nonfinite, huge.spike, huge.loss) == (False, True, 1e40)
    again = watch.judge(torch.tensor([1.0, 1.0]))
    assert again.dtype is torch.float64
