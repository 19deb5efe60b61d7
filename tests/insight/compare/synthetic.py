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
