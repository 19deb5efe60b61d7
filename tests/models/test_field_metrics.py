import math

import pytest
import torch

from lightning_ups.models.field_metrics import (
    NRMSE,
    CorrelationTime,
    SpectralError,
    correlation_time,
    nrmse,
    spectral_error,
)


def fields(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_nrmse_is_relative_for_each_sample_and_channel():
    target = torch.ones(2, 2, 4, 4)
    scale = torch.tensor([[1.0, 10.0], [100.0, 1000.0]])[..., None, None]
    error = torch.tensor([[0.1, 0.2], [0.3, 0.4]])[..., None, None]
    torch.testing.assert_close(nrmse(scale * (target + error), scale * target), torch.tensor(0.25))


def test_nrmse_of_a_field_of_zeros_is_finite():
    assert nrmse(torch.zeros(1, 1, 4), torch.zeros(1, 1, 4)) == 0


def test_nrmse_has_a_gradient():
    prediction = fields(2, 1, 8).requires_grad_()
    nrmse(prediction, fields(2, 1, 8, seed=1)).backward()
    assert prediction.grad.isfinite().all()


@pytest.mark.parametrize("grid", [(32,), (31,), (16, 24), (8, 8, 8)])
def test_squares_of_bands_add_up_to_that_of_nrmse(grid):
    prediction, target = fields(1, 1, *grid), fields(1, 1, *grid, seed=1)
    bands = spectral_error(prediction, target, edges=(2, 5))
    torch.testing.assert_close(bands.square().sum(), nrmse(prediction, target).square())


@pytest.mark.parametrize(("waves", "band"), [(1, 0), (4, 0), (5, 1), (12, 1), (13, 2)])
def test_a_wave_is_in_its_band(waves, band):
    target = fields(1, 1, 64)
    wave = torch.cos(waves * torch.arange(64) * 2 * math.pi / 64)
    bands = spectral_error(target + wave, target)
    assert bands.argmax() == band
    torch.testing.assert_close(bands.max(), wave.norm() / target.norm())


def test_bands_are_of_the_length_of_the_wave_vector():
    x = torch.arange(32) * 2 * math.pi / 32
    wave = torch.cos(4 * x)[:, None] * torch.cos(4 * x)  # 4 waves along each axis, 5.7 along the diagonal
    assert spectral_error(1 + wave[None, None], torch.ones(1, 1, 32, 32)).argmax() == 1


def test_spectral_error_has_a_gradient():
    prediction = fields(2, 1, 16).requires_grad_()
    spectral_error(prediction, fields(2, 1, 16, seed=1))[-1].backward()
    assert prediction.grad.isfinite().all()


class TestCorrelationTime:
    target = fields(2, 5, 1, 1024)

    def test_it_ends_when_the_correlation_first_falls(self):
        prediction = self.target.clone()
        prediction[0, 3] = -self.target[0, 3]
        assert correlation_time(prediction, self.target, interval=0.5).tolist() == [1.5, 2.5]

    def test_offset_and_scale_do_not_matter(self):
        assert correlation_time(3 * self.target + 1, self.target).tolist() == [5, 5]

    def test_a_wrong_first_step_is_no_time(self):
        assert correlation_time(-self.target, self.target).tolist() == [0, 0]

    def test_the_threshold(self):
        noise = fields(2, 5, 1, 1024, seed=1)  # a correlation of about 0.7
        assert correlation_time(self.target + noise, self.target, threshold=0.5).tolist() == [5, 5]
        assert correlation_time(self.target + noise, self.target, threshold=0.9).tolist() == [0, 0]


def batches():
    return [(fields(count, 2, 16, seed=count), fields(count, 2, 16, seed=10 + count)) for count in (2, 3)]


@pytest.mark.parametrize(("metric", "function"), [(NRMSE, nrmse), (SpectralError, spectral_error)])
def test_a_metric_is_the_function_of_all_samples(metric, function):
    made, parts = metric(), batches()
    for prediction, target in parts:
        made.update(prediction, target)
    everything = [torch.cat(each) for each in zip(*parts, strict=True)]
    torch.testing.assert_close(made.compute(), function(*everything))
    made.reset()
    made.update(*parts[0])
    torch.testing.assert_close(made.compute(), function(*parts[0]))


def test_the_metric_of_correlation_time():
    target = fields(4, 5, 1, 64)
    prediction = target.clone()
    prediction[0, 3] *= -1
    made = CorrelationTime(interval=2.0)
    made.update(prediction, target)
    assert made.compute() == (6 + 3 * 10) / 4


@pytest.mark.parametrize("metric", [NRMSE(), SpectralError(edges=(2,)), CorrelationTime()])
def test_updates_read_no_value_on_the_host(metric):
    """On the meta device there is none, so that reading one raises."""
    shape = (2, 3, 1, 16) if isinstance(metric, CorrelationTime) else (2, 1, 16)
    metric.to("meta").update(torch.empty(shape, device="meta"), torch.empty(shape, device="meta"))


def on_ranks():
    import torch.distributed as dist

    rank = dist.get_rank()
    found = []
    for metric in (NRMSE(), SpectralError()):
        metric.update(*batches()[rank])  # of two samples and of three
        found.append(metric.compute())
    rollout = fields(rank + 1, 5, 1, 64)
    metric = CorrelationTime()
    metric.update(rollout if rank == 0 else -rollout, rollout)
    return [value.tolist() for value in (*found, metric.compute())]


def test_ranks_are_joined_by_their_samples(ranks):
    error, bands, time = ranks(on_ranks)
    everything = [torch.cat(each) for each in zip(*batches(), strict=True)]
    assert error == pytest.approx(nrmse(*everything).item())
    assert bands == pytest.approx(spectral_error(*everything).tolist())
    assert time == pytest.approx(5 / 3)
