import pytest

from lightning_ups.insight.throughput.peaks import given_peaks, peaks_of


@pytest.mark.parametrize(
    ("name", "bf16", "fp8"),
    [
        ("NVIDIA H200", 989.4, 1978.9),
        ("NVIDIA H200 NVL", 835.5, 1671.0),
        ("NVIDIA H100 80GB HBM3", 989.4, 1978.9),
        ("NVIDIA GH200 480GB", 989.4, 1978.9),
        ("NVIDIA A100-SXM4-80GB", 312.0, None),
        ("NVIDIA GeForce RTX 5090", 209.5, 419.0),
    ],
)
def test_known_devices(name, bf16, fp8):
    peaks = peaks_of(name)
    assert (peaks.bf16, peaks.fp8) == (bf16, fp8)
    assert peaks.of("bf16") == bf16 * 1e12
    assert peaks.fp32 <= peaks.tf32 <= peaks.bf16


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "AMD Instinct MI300X",
        "cpu",
    ],
)
def test_unknown_devices_have_no_peaks(name):
    assert peaks_of(name) is None


def test_peaks_that_are_not_given_are_unknown():
    assert given_peaks({"fp8": 100.0}, arithmetic="bf16").of("bf16") is None


def test_peaks_may_be_given():
    assert given_peaks(100.0, arithmetic="tf32").of("tf32") == 100e12
    both = given_peaks({"bf16": 1.0, "fp8": 2.0}, arithmetic="bf16")
    assert (both.of("bf16"), both.of("fp8")) == (1e12, 2e12)
    assert given_peaks(1.0, arithmetic="bf16").of("fp8") is None


@pytest.mark.parametrize("wrong", [0, -1.0, {"bf17": 1.0}, {"bf16": float("nan")}])
def test_invalid_peaks_are_an_error(wrong):
    with pytest.raises(ValueError, match="peak_tflops"):
        given_peaks(wrong, arithmetic="bf16")
