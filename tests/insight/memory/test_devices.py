import pytest

from lightning_ups.insight.memory.account import GIB
from lightning_ups.insight.memory.devices import DEVICES, device_of


@pytest.mark.parametrize(
    ("said", "key"),
    [
        ("h100-80", "h100-80"),
        ("H200", "h200"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("rtx 3090", "rtx-3090"),
        ("b200", "b200"),
    ],
)
def test_names(said, key):
    assert device_of(said) is DEVICES[key]


def test_a_number_is_the_memory_in_gib():
    assert device_of("24").gib == 24
    assert device_of("79.5").gib == 79.5


@pytest.mark.parametrize(("said", "near"), [("a100", "a100-80, a100-40"), ("h101", "h100"), ("tpu", "Use one of")])
def test_an_unknown_gpu_is_an_error(said, near):
    with pytest.raises(ValueError, match=r"as in --gpu 24\.$") as caught:
        device_of(said)
    assert near in str(caught.value)


def test_less_is_usable_than_there_is_and_less_still_with_others():
    device = DEVICES["h200"]
    alone, with_others = device.usable(devices=1), device.usable(devices=8)
    assert with_others < alone < device.gib * GIB
    assert alone > 0.95 * device.gib * GIB
    assert device.workspace == 64 * 2**20
    assert DEVICES["rtx-4090"].workspace < 20 * 2**20
