import tracemalloc
from math import inf, isfinite, isnan, nan

import numpy as np
import pytest
import torch

from lightning_ups.insight.report.history import History


def history(*names, apart=1.0):
    made = History()
    for step in (1, 2):
        made.add({name: step + apart * index for index, name in enumerate(names)}, step)
    return made


def test_only_numbers_are_kept():
    made = History()
    made.add({"hp_metric": -1, "loss": np.float32(1.5), "name": "x", "epoch": 0, 3: 1, "tensor": torch.tensor(1.0)}, 7)
    assert made.series == {"loss": [(7.0, 1.5)], "3": [(7.0, 1.0)]}


def test_training_and_validation_share_a_chart():
    (chart,) = history("train_loss_step", "val_loss", "train/loss").charts()
    assert (chart.section, chart.title) == ("Curves", "loss")
    assert set(chart.series) == {"train_loss_step", "val_loss", "train/loss"}


@pytest.mark.parametrize("names", [("loss/train", "loss/val"), ("loss_train_step", "loss_val_epoch"), ("loss.valid",)])
def test_a_phase_at_the_end_is_read_too_and_a_single_curve_keeps_its_name(names):
    (chart,) = history(*names).charts()
    assert chart.title == ("loss" if len(names) > 1 else names[0])
    assert [*chart.series] == [*names]


def test_a_single_curve_keeps_its_phase():
    assert [chart.title for chart in history("train_acc", "val_loss", "time_to_train").charts()] == [
        "train_acc",
        "val_loss",
        "time_to_train",
    ]


def test_figures_of_this_package_have_their_sections():
    made = history(
        "gpu/power_w",
        "throughput/tokens_per_s",
        "throughput/tokens_per_s_per_device",
        "throughput/step_ms",
        "throughput/step_p95_ms",
        "throughput/data_ms",
        "throughput/forward_ms",
        "throughput/mfu",
        "memory/reserved_gib",
        "memory/allocated_gib",
        "lr",
    )
    found = [(chart.section, chart.title, [*chart.series]) for chart in made.charts()]
    assert found == [
        ("Curves", "lr", ["lr"]),
        ("Speed", "tokens per second", ["tokens", "tokens per device"]),
        ("Speed", "step, ms", ["step", "step_p95"]),
        ("Speed", "split of a step, ms", ["data", "forward"]),
        ("Speed", "utilisation of FLOPs", ["mfu"]),
        ("Memory", "peak memory, GiB", ["reserved", "allocated"]),
        ("GPU", "power_w", ["power_w"]),
    ]


@pytest.mark.parametrize("bad", [nan, inf])
def test_values_that_are_not_finite_are_kept_beside_the_others(bad):
    made = History()
    for step in range(2_000):
        made.add({"loss": bad if step % 2 else 1.0}, step)
    kept = made.series["loss"]
    assert len(kept) <= 600
    assert sum(isfinite(value) for _, value in kept) >= 100
    assert not all(isfinite(value) for _, value in kept)


def test_equal_series_are_drawn_once_under_both_names():
    (chart,) = history("throughput/mfu", "throughput/hfu", apart=0.0).charts()
    assert [*chart.series] == ["mfu = hfu"]


def test_a_long_run_takes_no_more_memory_than_a_short_one():
    made = History()
    tracemalloc.start()
    for step in range(60_000):
        made.add({"loss": 100.0 if step == 5_003 else 2.0 + step / 60_000, "bad": float("nan")}, step)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 200_000
    points = made.series["loss"]
    assert len(points) <= 400
    assert (5_003.0, 100.0) in points
    assert (points[0], points[-1][0]) == ((0.0, 2.0), 59_999.0)
    assert points == sorted(points)
    middle = [step for step, _ in points if 20_000 <= step < 40_000]
    assert len(middle) == pytest.approx(len(points) / 3, rel=0.1)  # early steps are not thinner than late ones
    assert isnan(made.series["bad"][0][1])


def test_the_number_of_charts_is_limited():
    made = History()
    made.add({f"layer{number}/norm": 1.0 for number in range(300)} | {"gpu/power_w": 600.0}, 0)
    charts = made.charts(most=20)
    assert [chart.title for chart in charts] == [*(f"layer{number}/norm" for number in range(20)), "power_w"]
    assert made.left_out(most=20) == [f"layer{number}/norm" for number in range(20, 300)]
