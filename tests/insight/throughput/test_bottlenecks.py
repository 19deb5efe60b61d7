"""Thresholds, and the one thing to change first."""

import pytest

from lightning_ups.insight.throughput.bottlenecks import bottlenecks, checks, first_change, unmeasured
from lightning_ups.insight.throughput.meter import Flops, Inspection, RankTimes, Summary

GIB = 2**30
HEALTHY = {
    "unit": "tokens",
    "device": "NVIDIA H200",
    "num_devices": 8,
    "steps": 100,
    "warmup_steps": 10,
    "units_per_s": 8e5,
    "step_s": 1.0,
    "fit_s": 200.0,
    "split": {"data": 0.001, "transfer": 0.002, "forward": 0.3, "backward": 0.6, "optimizer": 0.09, "other": 0.007},
    "inspection": Inspection(
        steps=2, seconds=1.0, idle=0.02, exposed_communication=0.03, communication=0.3, exposed_copies=0.0
    ),
    "utilisation": {"mfu": 0.55, "hfu": 0.6},
    "flops": Flops(model=1.0, hardware=1.0),
    "memory": {"allocated": 110 * GIB, "reserved": 120 * GIB, "total": 140 * GIB, "retries": 0},
    "gpu": {
        "utilisation": 0.99,
        "power_w": 690.0,
        "clock_mhz": 1500,
        "max_clock_mhz": 1980,
        "slowed_by": ["power limit"],
    },
    "single_device": 1.1e5,
    "hints": {"num_workers": 4, "pin_memory": True},
}
SMALL = {"allocated": 9 * GIB, "reserved": 10 * GIB, "total": 140 * GIB, "retries": 0}


def run(**changed):
    return Summary(**HEALTHY | changed)


def looked(**changed):
    settings = {"steps": 2, "seconds": 1.0, "idle": 0.02, "exposed_communication": 0.03, "communication": 0.3}
    return Inspection(**{**settings, "exposed_copies": 0.0} | changed)


def split(**changed):
    return {**HEALTHY["split"], **changed}


def test_a_healthy_run_passes_everything_and_nothing_is_to_change():
    found = checks(run())
    assert [check.passed for check in found] == [True] * 6
    assert [check.name for check in found] == [
        "GPU utilisation",
        "GPU memory",
        "waiting for data",
        "exposed communication",
        "MFU",
        "scaling efficiency",
    ]
    assert first_change(run()) is None


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"gpu": {"utilisation": 0.799}}, "GPU utilisation"),
        ({"memory": SMALL}, "GPU memory"),
        ({"memory": {**SMALL, "reserved": 139 * GIB}}, "GPU memory"),
        ({"split": split(data=0.051)}, "waiting for data"),
        ({"inspection": looked(exposed_communication=0.151)}, "exposed communication"),
        ({"utilisation": {"mfu": 0.499}}, "MFU"),
        ({"single_device": 1.252e5}, "scaling efficiency"),
    ],
)
def test_each_threshold_can_fail(changed, name):
    assert [check.name for check in checks(run(**changed)) if check.passed is False] == [name]


def test_a_threshold_compares_what_is_printed():
    (waiting,) = [check for check in checks(run(split=split(data=0.0504))) if check.name == "waiting for data"]
    assert (f"{waiting.value:.1%}", waiting.wanted, waiting.passed) == ("5.0%", "<= 5 %", True)
    assert first_change(run(split=split(data=0.0504))) is None


def test_only_what_was_measured_is_a_threshold_and_what_could_be_has_its_cure():
    bare = Summary(unit="tokens", device="cpu", num_devices=1, steps=3, warmup_steps=0, split={"data": 0.1})
    assert [(check.name, check.passed) for check in checks(bare)] == [("waiting for data", False)]
    assert unmeasured(bare) == []
    assert unmeasured(run()) == []
    (utilisation, communication, scaling) = unmeasured(run(gpu={}, inspection=None, single_device=None))
    assert utilisation == "GPU utilisation (pip install nvidia-ml-py)"
    assert communication == "exposed communication (set inspect_at)"
    assert scaling == "scaling efficiency (set single_device)"


FOUND = {
    "slow loader": ({"split": split(data=0.4), "inspection": looked(idle=0.42)}, "40%"),
    "slow transfer": ({"split": split(transfer=0.2), "inspection": looked(idle=0.1)}, "20%"),
    "host sync": (
        {"inspection": looked(idle=0.3, waits=(("model.py:42 (training_step)", 2), ("other.py:1 (f)", 1)))},
        "model.py:42 (training_step) (2x a step) and 1 more",
    ),
    "batch too small": ({"inspection": looked(idle=0.6), "memory": SMALL, "utilisation": {"mfu": 0.1}}, "93%"),
    "uneven steps": ({"uneven": 0.3, "step_p95_s": 4.0}, "30%"),
    "slow host": ({"inspection": looked(idle=0.3)}, "30%"),
    "slow exchange": ({"inspection": looked(exposed_communication=0.35)}, "35%"),
    "throttled GPU": ({"gpu": {**HEALTHY["gpu"], "clock_mhz": 990, "slowed_by": ["too hot"]}}, "990 of 1980 MHz"),
    "out of memory, nearly": ({"memory": {**HEALTHY["memory"], "retries": 7}}, "7 allocations"),
    "much validation": ({"pauses": {"validation": 60.0}}, "30%"),
    "slow ends of epochs": ({"between_s": 50.0, "hints": {}}, "25%"),
    "slow checkpoints": ({"pauses": {"checkpoint": 50.0}}, "25%"),
}


@pytest.mark.parametrize("name", FOUND)
def test_each_bottleneck_is_found_and_named(name):
    changed, figure = FOUND[name]
    (found,) = bottlenecks(run(**changed))
    assert found == first_change(run(**changed))
    assert found.name == name
    assert figure in found.what
    assert found.change


def test_a_small_batch_is_named_though_the_gpu_is_busy():
    found = first_change(run(memory=SMALL, utilisation={"mfu": 0.3}))
    assert found.name == "batch too small"
    assert "MFU is 30%" in found.what
    assert first_change(run(utilisation={"mfu": 0.3})).name == "slow kernels"
    assert first_change(run(utilisation={"mfu": 0.3}, memory={})).what == "MFU is 30%"  # of the rest nothing is known


def test_the_costliest_comes_first():
    both = run(split=split(data=0.1), inspection=looked(idle=0.12, exposed_communication=0.4))
    assert [each.name for each in bottlenecks(both)] == ["slow exchange", "slow loader"]


@pytest.mark.parametrize(
    "effect",
    [{"inspection": looked(idle=0.4, waits=(("a.py:1 (f)", 1),))}, {"uneven": 0.45, "step_p95_s": 4.0}],
    ids=["idle", "uneven"],
)
def test_time_lost_to_the_loader_has_one_cause(effect):
    assert [each.name for each in bottlenecks(run(split=split(data=0.4), **effect))] == ["slow loader"]


def test_a_part_that_the_run_has_is_not_advised():
    changed = {"uneven": 0.3, "step_p95_s": 4.0}
    assert "AccelerationFlags(gc_interval=100)" in first_change(run(**changed)).change
    assert "garbage" not in first_change(run(**changed, hints={"parts": {"gc_interval"}})).change
    changed = {"inspection": looked(idle=0.3), "hints": {"parts": {"Compile", "BF16Precision"}}}
    assert first_change(run(**changed)).change == "use a fused optimizer, log less often"


def test_a_short_run_gets_no_advice():
    changed = {"split": split(data=0.4), "steps": 22}
    assert first_change(run(**changed, fit_s=6.0)) is None
    assert first_change(run(**changed, fit_s=60.0)) is not None


def test_the_rows_of_a_short_run_say_why_there_is_no_advice():
    (failed,) = [each for each in checks(run(split=split(data=0.4), steps=22, fit_s=6.0)) if not each.passed]
    assert (failed.name, failed.note) == ("waiting for data", "22 steps are too few to say why")


def test_a_slow_loader_that_is_not_first_has_its_advice_in_its_row():
    changed = {"split": split(data=0.1), "hints": {"num_workers": 0}}
    both = run(**changed, inspection=looked(idle=0.12, exposed_communication=0.4))
    assert "set num_workers of the DataLoader" in [each.note for each in checks(both)]
    assert {each.note for each in checks(run(**changed))} == {""}


def test_on_a_cpu_the_hooks_of_the_batch_are_named_in_place_of_a_copy():
    changed = {"split": split(transfer=0.5), "inspection": None, "memory": {}, "gpu": {}, "utilisation": {}}
    hooks = {"batch_hooks": ["Latents.on_after_batch_transfer"]}
    found = first_change(run(**changed, device="cpu", num_devices=1, hints=hooks))
    assert (found.name, found.what) == (
        "slow batch hooks",
        "50% of each step is spent in Latents.on_after_batch_transfer",
    )
    assert "copying" in first_change(run(**changed)).what
    assert "copy to the device" in first_change(run(**changed, hints=hooks)).what


def test_logging_that_takes_most_of_a_step_comes_before_uneven_steps():
    changed = {"split": split(other=0.75), "uneven": 0.82, "step_p95_s": 4.0}
    hints = {"log_every_n_steps": 2, "batch_callbacks": ["Mine"]}
    (found,) = bottlenecks(run(**changed, hints=hints))
    assert found.name == "slow loop"
    assert "log less often (log_every_n_steps=2 now), do less after each batch in Mine" in found.change
    assert "log less" not in first_change(run(**changed)).change  # without a logger


def test_on_a_cpu_no_exposed_communication_is_missed():
    assert unmeasured(run(gpu={}, memory={}, inspection=None)) == []


def test_few_steps_are_never_uneven():
    assert bottlenecks(run(uneven=0.3, step_p95_s=4.0, steps=19)) == []


def test_a_slow_rank_costs_what_the_others_wait():
    def rank(forward):
        return RankTimes(steps=2, seconds=2.0, units=1.0, split={"forward": 2 * forward}, split_seconds=2.0)

    assert bottlenecks(run(ranks=[rank(0.8), rank(0.4)], device="cpu")) == []  # they share cores
    (found,) = bottlenecks(run(ranks=[rank(0.8), rank(0.4)]))
    assert "rank 0 takes 100% longer" in found.what
    assert found.lost == pytest.approx(0.4)


def test_workers_that_start_with_each_epoch_are_named():
    started = {"num_workers": 8, "persistent_workers": False}
    assert "persistent_workers=True" in first_change(run(between_s=50.0, hints=started)).change
    assert "persistent_workers" not in first_change(run(between_s=50.0, hints={"num_workers": 0})).change


@pytest.mark.parametrize(
    ("workers", "advice"),
    [
        (None, "set num_workers of the DataLoader (to at most 4,"),
        (0, "set num_workers of the DataLoader (to at most 4,"),
        (3, "raise num_workers (to at most 4,"),
        (4, "prepare the data ahead of training or more cheaply: there is a worker for each of the 4"),
    ],
)
def test_no_more_workers_than_cores_are_advised(monkeypatch, workers, advice):
    monkeypatch.setitem(bottlenecks.__globals__, "usable_cores", lambda: 4)
    hints = {} if workers is None else {"num_workers": workers}
    slow = Summary(
        unit="samples", device="cpu", num_devices=1, steps=99, warmup_steps=0, split={"data": 0.5}, hints=hints
    )
    assert first_change(slow).change.startswith(advice)


def test_a_power_limit_alone_is_no_trouble():
    assert first_change(run(gpu={**HEALTHY["gpu"], "slowed_by": ["power limit"]})) is None
