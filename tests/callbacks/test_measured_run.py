"""What a run knows besides what tests/callbacks/test_token_throughput.py sees of it."""

import pytest
import torch
from lightning.pytorch.plugins import HalfPrecision, MixedPrecision, Precision

from lightning_ups.callbacks import measured_run
from lightning_ups.precision import BF16Precision


class Trainer:
    def __init__(self, precision):
        self.precision_plugin = precision


@pytest.fixture
def tf32():
    before = torch.get_float32_matmul_precision()
    yield torch.set_float32_matmul_precision
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("precision", "products", "arithmetic"),
    [
        (BF16Precision(), "highest", "bf16"),
        (MixedPrecision("bf16-mixed", "cpu"), "highest", "bf16"),
        (HalfPrecision("16-true"), "highest", "bf16"),
        (Precision(), "highest", "fp32"),
        (Precision(), "high", "tf32"),
    ],
    ids=["ours", "bf16-mixed", "16-true", "float32", "tf32"],
)
def test_the_peak_follows_what_products_are_computed_in(tf32, precision, products, arithmetic):
    tf32(products)
    assert measured_run._arithmetic(Trainer(precision)) == arithmetic


def test_only_numbers_of_a_sensor_are_logged():
    reading = {"power_w": 600.0, "clock_mhz": 1500, "slowed_by": ["too hot"], "name": "x"}
    assert measured_run._numbers(reading) == {"gpu/power_w": 600.0, "gpu/clock_mhz": 1500, "gpu/slowed": 1.0}
    assert measured_run._numbers({}) == {}


@pytest.mark.parametrize(("rate", "text"), [(12.34, "12.3"), (1234, "1.23K"), (5_300_000, "5.3M"), (2e9, "2G")])
def test_rates_are_short_in_the_bar(rate, text):
    assert measured_run._short(rate) == text


@pytest.mark.gpu(count=1)
def test_memory_of_a_gpu():
    device = torch.device("cuda", 0)
    held = torch.ones(2**20, device=device)
    memory = measured_run._memory(device)
    assert held.nbytes <= memory["allocated"] <= memory["reserved"] <= memory["total"]
    assert memory["retries"] == 0
