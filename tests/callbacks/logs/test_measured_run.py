"""What a run knows besides what tests/callbacks/logs/test_token_throughput.py sees of it."""

import pytest
import torch
from lightning.pytorch.plugins import HalfPrecision, MixedPrecision, Precision

from lightning_ups.callbacks.logs import measured_run
from lightning_ups.precision import BF16Precision


class Trainer:
    def __init__(self, precision, module=None):
        self.precision_plugin = precision
        self.lightning_module = module or torch.nn.Linear(8, 8)


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
    assert measured_run._arithmetic(measured_run._computes_in(Trainer(precision))) == arithmetic


def test_a_user_of_both_interfaces_of_tf32_is_no_error():
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        assert measured_run._arithmetic(torch.float32) == "tf32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def test_where_nothing_casts_the_weights_say_the_type():
    def dtype(*layers):
        return measured_run._computes_in(Trainer(Precision(), torch.nn.Sequential(*layers)))

    large, small = torch.nn.Linear(64, 64), torch.nn.Linear(8, 8)
    assert dtype(large.to(torch.bfloat16), small) is torch.bfloat16
    assert dtype(torch.nn.Linear(8, 8).double()) is torch.float64
    assert dtype(torch.nn.LazyLinear(8), small) is torch.float32
    assert dtype(torch.nn.GELU()) is torch.float32


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
