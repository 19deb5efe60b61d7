"""Synthetic step times and losses, with what real ones have: outliers, drift, autocorrelation, a slow start."""

import numpy as np

from lightning_ups.insight.compare.reading import RunLog, Series


def step_times(seed, *, count=600, spread=0.015, correlation=0.6, outliers=0.02, drift=0.004, seconds=0.1):
    rng = np.random.default_rng(seed)
    noise = rng.normal(size=count) * np.sqrt(1 - correlation**2)
    for index in range(1, count):
        noise[index] += correlation * noise[index - 1]
    position = np.arange(count) / count
    wave = np.sin(2 * np.pi * (position * rng.uniform(0.5, 2) + rng.uniform()))
    slow_start = 1 + 5 * np.exp(-np.arange(count) / 3)
    stalls = np.where(rng.random(count) < outliers, rng.uniform(1.5, 5, count), 1)
    return seconds * np.exp(spread * noise + drift * (wave + position * rng.uniform(-1, 1))) * slow_start * stalls


def losses(seed, *, count=400, end=2.0, noise=0.05):
    rng = np.random.default_rng(seed)
    return end + 2 * np.exp(-np.arange(count) / 60) + noise * rng.normal(size=count)


def series(values, *, every=1, first=0):
    return Series(first + every * np.arange(len(values), dtype=float), np.asarray(values, dtype=float))


def run(name="run", *, times=None, settings=None, manifest=None, **metrics):
    found = {} if times is None else {"step_times.csv": series(times)}
    columns = {key: each if isinstance(each, Series) else series(each) for key, each in metrics.items()}
    return RunLog(name=name, series=columns, times=found, settings=settings or {}, manifest=manifest or {})


def _correlated(rng, count, correlation):
    noise = rng.normal(size=count) * np.sqrt(1 - correlation**2)
    noise[0] = rng.normal()
    for index in range(1, count):
        noise[index] += correlation * noise[index - 1]
    return noise


def _validation(rng, count):
    times = np.exp(0.03 * rng.normal(size=count))
    times[49::50] *= rng.uniform(5, 12, size=len(times[49::50]))
    return times


def _bursts(rng, count):
    """Let other programs run for some 40 steps, and then pause for some 90."""
    is_busy, found = rng.random() < 0.3, np.empty(count, dtype=bool)
    for index in range(count):
        is_busy ^= rng.random() < (1 / 40 if is_busy else 1 / 90)
        found[index] = is_busy
    return np.exp(0.01 * rng.normal(size=count)) * np.where(found, 1.25 + 0.08 * rng.normal(size=count), 1)


def _batches(rng, count):
    lengths = np.exp(0.3 * np.random.default_rng(7).normal(size=count))  # the same batches in both runs
    return lengths * np.exp(0.02 * rng.normal(size=count))


NOISES = {  # step times of one run, in units of a step; nothing in the package was chosen by them
    "white": lambda rng, count: np.exp(0.05 * rng.normal(size=count)),
    "correlated": lambda rng, count: np.exp(0.03 * _correlated(rng, count, 0.9)),
    "strongly correlated": lambda rng, count: np.exp(0.03 * _correlated(rng, count, 0.97)),
    "heavy tails": lambda rng, count: 1 + 0.01 * rng.normal(size=count) + 0.03 * abs(rng.standard_t(1.8, size=count)),
    "trend": lambda rng, count: np.exp(0.02 * rng.normal(size=count) + 0.01 * rng.normal() * np.linspace(-1, 1, count)),
    "walk": lambda rng, count: np.exp(
        0.02 * rng.normal(size=count) + (0.01 / count**0.5) * rng.normal(size=count).cumsum()
    ),
    "validation": _validation,
    "bursts": _bursts,
    "two modes": lambda rng, count: (
        np.where(rng.random(count) < 0.35, 1.06, 1) * np.exp(0.008 * rng.normal(size=count))
    ),
    "batches": _batches,
}
