import re
from dataclasses import replace

from lightning_ups.insight.throughput.meter import Flops, Inspection, Summary
from lightning_ups.insight.throughput.table import rows, text_table

GIB = 2**30
FULL = Summary(
    unit="tokens",
    device="NVIDIA H200",
    num_devices=2,
    steps=90,
    warmup_steps=10,
    units_per_s=123_456.0,
    units_per_s_per_device=61_728.0,
    step_s=0.0123,
    step_p95_s=0.02,
    split={"data": 0.4, "transfer": 0.0, "forward": 0.2, "backward": 0.3, "optimizer": 0.05, "other": 0.05},
    pauses={"validation": 3.0, "checkpoint": 0.0},
    start_s=61.0,
    fit_s=600.0,
    inspection=Inspection(
        steps=2,
        seconds=0.0123,
        idle=0.41,
        exposed_communication=0.02,
        communication=0.1,
        exposed_copies=0.01,
        waits=(("model.py:42 (training_step)", 1),),
    ),
    flops=Flops(model=4.0, hardware=5.0, low_precision=3.0, peak=1.0, low_precision_peak=2.0),
    utilisation={"mfu": 0.61, "hfu": 0.7, "mfu_mixed": 0.4},
    memory={"allocated": 100 * GIB, "reserved": 120 * GIB, "total": 140 * GIB, "retries": 2},
    gpu={"utilisation": 0.6, "power_w": 400.4, "clock_mhz": 1980.0, "slowed_by": ["power limit"]},
)


def test_the_table_says_what_was_measured():
    text = text_table(FULL)
    for part in (
        "2 x NVIDIA H200",
        "123,456 in all, 61,728 per device",
        "12.3 ms median, 20 ms p95",
        "MFU 61.0%, HFU 70.0%; with the 75% in fp8 at fp8's peak 40.0%",
        "waiting for data 40.0%",
        "idle 41.0%, exposed copies 1.0%, exposed communication 2.0% (of 10.0%)",
        "model.py:42 (training_step) 1x",
        "10 min in all, until the first step was done 61 s, validation 3 s",
        "100.0 GiB allocated, 120.0 reserved of 140.0, 2 retries",
        "60% busy, 400 W, 1980 MHz, slowed by power limit",
        "Change first: slow loader: 40% of each step",
    ):
        assert part in text, part
    assert "checkpoint" not in text
    assert text.rstrip().endswith(
        "To look closer: python -m lightning_ups diagnose --config RUN.yaml, or --model FILE.CLASS --data FILE.CLASS"
    )
    assert "\n  not measured: scaling efficiency (set single_device)\n" in text
    assert re.search(r"\n  MFU +61.0% .*pass\n", text)
    assert re.search(r"\n  waiting for data +40.0% .*FAIL\n", text)


def test_a_run_without_trouble_says_so():
    calm = replace(
        FULL,
        split={"data": 0.0, "forward": 1.0},
        inspection=None,
        memory={**FULL.memory, "retries": 0},
        gpu={},
        utilisation={"mfu": 0.6, "hfu": 0.6},
    )
    assert "nothing that was measured stands out" in text_table(calm)


def test_a_run_on_a_cpu_has_no_rows_of_a_gpu():
    text = text_table(replace(FULL, device="cpu", num_devices=1, inspection=None, memory={}, gpu={}, utilisation={}))
    _, thresholds = text.split("threshold")
    assert "waiting for data" in thresholds
    for name in ("GPU", "MFU", "communication", "scaling", "not measured"):
        assert name not in thresholds, name


def test_a_run_within_its_warmup_says_so():
    short = Summary(unit="tokens", device="cpu", num_devices=1, steps=0, warmup_steps=10)
    assert "within its warm-up of 10 steps" in text_table(short)
    assert rows(short) == []
