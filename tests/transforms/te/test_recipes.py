import pytest
import torch

from lightning_ups.transforms.te import RECIPES
from tests import fake_te


def test_recipes_make_what_transformer_engine_has():
    with fake_te.installed():
        delayed = RECIPES["delayed"].make(
            number_format="e4m3", amax_history=16, amax_compute="most_recent", margin=1, reduce_amax=False
        )
        assert (delayed.fp8_format, delayed.amax_history_len) == (fake_te.Format.E4M3, 16)
        assert (delayed.amax_compute_algo, delayed.margin, delayed.reduce_amax) == ("most_recent", 1, False)
        assert RECIPES["delayed"].make().fp8_format is fake_te.Format.HYBRID
        current = RECIPES["current"].make(attention=True)
        assert type(current) is fake_te.Float8CurrentScaling
        assert current.fp8_dpa
        assert type(RECIPES["block"].make()) is fake_te.Float8BlockScaling
        assert type(RECIPES["mxfp8"].make()) is fake_te.MXFP8BlockScaling


def test_why_a_device_cannot():
    with fake_te.installed(everywhere=False):
        assert RECIPES["current"].why_not(torch.device("cpu")) == "it runs on cuda devices alone"
        assert RECIPES["mxfp8"].why_not(torch.device("cuda")).endswith("required for MXFP8 execution")
        assert RECIPES["block"].why_not(torch.device("cuda")) is None


@pytest.mark.parametrize(
    ("name", "capability", "width", "why"),
    [
        ("current", (9, 0), None, "a GPU of capability 9.0 has it with recipe='delayed' alone"),
        ("mxfp8", (9, 0), 128, "a GPU of capability 9.0 has it with recipe='delayed' alone"),
        ("delayed", (9, 0), None, None),
        ("delayed", (9, 0), 128, None),
        ("delayed", (9, 0), 64, "a GPU of capability 9.0 has it for heads of 128, and these are of 64"),
        ("current", (10, 0), 64, None),
        ("current", (10, 0), 72, "heads of 72 are no multiple of 16 up to 128"),
        ("mxfp8", (10, 3), 256, "heads of 256 are no multiple of 16 up to 128"),
        ("delayed", (8, 9), None, "a GPU of capability 8.9 has no float8 attention"),
        ("current", (12, 0), None, "a GPU of capability 12.0 has no float8 attention"),
    ],
)
def test_why_attention_cannot_train_in_float8(monkeypatch, name, capability, width, why):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert RECIPES[name].why_no_attention(torch.device("cuda"), width=width) == why
    assert RECIPES[name].why_no_attention(torch.device("cpu"), width=width) is None
